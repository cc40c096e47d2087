"""Random programs of copies, kernels and waits over streams, threads and devices.

A small model of the order that the specification promises stands next to the device: each stream
knows which work of the others is done before its next (a vector clock). A program adds a wait
exactly where the model says that one is needed, so that every wait counts: one that does not wait
gives a wrong value.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.program_steps import Step
from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject

__all__ = ["run_program"]

#: Elements of a value: small, more than a block of threads, and what drivers copy in pieces.
_SIZES: Final = (300, 1, 70_000, 300_001)
_SIDE: Final = 2  # streams next to the default one, of each device
_MANY: Final = 12  # events at once: more than a small pool of them has


Stamp = tuple[int, int]  # a stream, and which piece of its work


@dataclasses.dataclass
class _Value:
    tensor: torch.Tensor
    expected: torch.Tensor
    device: int
    home: int  # the stream that was current when it was made
    written: Stamp
    read: list[Stamp] = dataclasses.field(default_factory=list)

    def part(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What is moved of it: all, or now and then what follows its first element."""
        first = 1 if number % 3 == 1 and self.expected.numel() > 1 else 0
        return self.tensor[first:], self.expected[first:]


@dataclasses.dataclass
class _Stream:
    """A stream, and how much of each stream's work is done before its next."""

    real: Any
    device: int
    clock: dict[int, int] = dataclasses.field(default_factory=dict)


class _Run:
    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.backend = subject.backend
        self.streams: list[_Stream] = []
        for index in subject.indices[:3]:
            self.streams.append(_Stream(self.backend.current_stream(index), index))
            for _ in range(_SIDE):
                self.streams.append(_Stream(self.backend.new_stream(index), index))
        self.in_use = list(range(len(self.streams)))
        self.values: list[_Value] = []
        self.events: list[tuple[Any, dict[int, int]]] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor, Stamp]] = []
        self.kept: list[Any] = []  # what queued work may still read

    # ------------------------------------------------------------------ the model

    def stamp(self, number: int) -> Stamp:
        """A new piece of work on a stream."""
        clock = self.streams[number].clock
        clock[number] = clock.get(number, 0) + 1
        return number, clock[number]

    def after(self, number: int, stamps: list[Stamp]) -> None:
        """Order a stream after pieces of work: by an event that is there, or by a new one."""
        stream = self.streams[number]
        for other, piece in stamps:
            if stream.clock.get(other, 0) >= piece:
                continue
            known = [e for e in self.events if e[1].get(other, 0) >= piece]
            event, clock = known[0] if known else self.record(other)
            if not known and piece % 2:  # waited for once, and gone
                self.events.pop()
            self.backend.wait_event(stream.real, event)
            self.know(stream, clock)
            del event

    def know(self, stream: _Stream, clock: dict[int, int]) -> None:
        """What is queued on a stream from now on comes after so much of the others' work."""
        for one, done in clock.items():
            stream.clock[one] = max(stream.clock.get(one, 0), done)

    def host_knows(self, clock: dict[int, int]) -> None:
        """The host has waited for so much: it is done, and all that comes later comes after it.

        Raises:
            AssertionError: a copy to the host that shall be done by now is not there.
        """
        for stream in self.streams:
            self.know(stream, clock)
        for copy, expected, (number, piece) in self.copies:
            if clock.get(number, 0) >= piece:
                assert torch.equal(copy, expected), (
                    "a copy to the host is not there, though the host has waited for it"
                )

    def record(self, number: int) -> tuple[Any, dict[int, int]]:
        """An event of a stream, with what is done before it."""
        stream = self.streams[number]
        self.events.append((self.backend.record_event(stream.real), dict(stream.clock)))
        return self.events[-1]

    # ------------------------------------------------------------------ the steps

    def step(self, step: Step) -> None:
        number = self.in_use[step.stream % len(self.in_use)]
        if step.kind == "upload" or not self.values:
            self.upload(number, step.value)
        elif step.kind == "record":
            for _ in range(_MANY):
                self.record(number)
        elif step.kind == "host waits":
            event, clock = self.record(number)
            self.backend.synchronize_event(event)
            self.host_knows(dict(clock))
        elif step.kind == "wait for all":
            self.wait_for_all(self.streams[number].device)
        elif step.kind == "other members":
            self.other_members(self.streams[number].device)
        elif step.kind == "retire":
            self.retire(number)
        else:
            value = self.values[step.value % len(self.values)]
            act: dict[str, Callable[[int, _Value], None]] = {
                "kernel": self.kernel,
                "in place": self.in_place,
                "download": self.download,
                "blocking download": self.blocking_download,
                "cross": self.cross,
                "blocking cross": partial(self.cross, blocking=True),
                "let go": self.let_go,
            }
            act[step.kind](number, value)

    def on(self, value: _Value, number: int) -> int:
        """A stream of a value's device."""
        mine = [n for n in self.in_use if self.streams[n].device == value.device]
        return mine[number % len(mine)]

    def upload(self, number: int, seed: int) -> None:
        stream = self.streams[number]
        size = _SIZES[seed * 3 // 4 % len(_SIZES)] if seed else _SIZES[0]
        host = torch.arange(float(size)) + seed
        source = host.clone()
        if self.subject.capabilities.pinned_memory and seed % 2:
            source = self.backend.pin_memory(source)
        self.kept.append(source)
        with self.backend.use_stream(stream.real):
            tensor = self.subject.put(source, stream.device, non_blocking=True)
        self.values.append(_Value(tensor, host, stream.device, number, self.stamp(number)))

    def kernel(self, number: int, value: _Value) -> None:
        number = self.on(value, number)
        self.after(number, [value.written])
        with self.backend.use_stream(self.streams[number].real):
            tensor = value.tensor + 1
        stamp = self.stamp(number)
        value.read.append(stamp)
        self.values.append(_Value(tensor, value.expected + 1, value.device, number, stamp))

    def in_place(self, number: int, value: _Value) -> None:
        number = self.on(value, number)
        self.after(number, [value.written, *value.read])
        with self.backend.use_stream(self.streams[number].real):
            value.tensor.mul_(2)
        value.expected = value.expected * 2
        value.written, value.read = self.stamp(number), []

    def download(self, number: int, value: _Value) -> None:
        number = self.on(value, number)
        self.after(number, [value.written])
        with self.backend.use_stream(self.streams[number].real):
            part, expected = value.part(number)
            copy = self.subject.fetch(part, non_blocking=True)
        stamp = self.stamp(number)
        value.read.append(stamp)
        self.copies.append((copy, expected, stamp))

    def blocking_download(self, number: int, value: _Value) -> None:
        number = self.on(value, number)
        self.after(number, [value.written])
        with self.backend.use_stream(self.streams[number].real):
            copy = self.subject.fetch(value.tensor)
        value.read.append(self.stamp(number))
        assert torch.equal(copy, value.expected), "a blocking copy to the host is not there"
        self.host_knows(dict(self.streams[number].clock))

    def let_go(self, number: int, value: _Value) -> None:
        """Its memory is used again on the stream that asked for it: after all that was done."""
        self.after(value.home, [value.written, *value.read])
        self.values = [other for other in self.values if other is not value]

    def cross(self, number: int, value: _Value, blocking: bool = False) -> None:
        target, stream = number, self.streams[number]
        if stream.device == value.device:
            self.kernel(number, value)
            return
        source = self.on(value, number)
        # A copy between devices is ordered with the current streams of both.
        self.after(source, [value.written])
        with (
            self.backend.use_stream(self.streams[source].real),
            self.backend.use_stream(stream.real),
        ):
            part, expected = value.part(number)
            tensor = self.subject.put(part, stream.device, non_blocking=not blocking)
        stamp = self.stamp(target)
        value.read.append(self.stamp(source))  # what comes later there comes after the copy
        self.values.append(_Value(tensor, expected, stream.device, target, stamp))

    def wait_for_all(self, device: int) -> None:
        self.backend.synchronize(device)
        for stream in [stream for stream in self.streams if stream.device == device]:
            self.host_knows(dict(stream.clock))

    def other_members(self, device: int) -> None:
        """Members that change no order and spoil no work."""
        self.backend.empty_cache(device)
        for ask in (self.backend.memory_info, self.backend.memory_allocated):
            with contextlib.suppress(NotImplementedError):
                ask(device)
        self.backend.device_name(device)
        self.backend.current_stream(device)
        if self.subject.capabilities.pinned_memory:
            self.backend.pin_memory(torch.zeros(_SIZES[0]))
        with self.backend.use_stream(self.backend.new_stream(device)):
            torch.zeros(_SIZES[0], device=self.subject.device(device))

    def retire(self, number: int) -> None:
        """A side stream goes while its work is queued, which is done all the same."""
        stream = self.streams[number]
        if self.default(number) or any(value.home == number for value in self.values):
            return  # memory is used again on the stream that asked for it: that must be there
        self.record(number)
        stream.real = None
        self.streams.append(_Stream(self.backend.new_stream(stream.device), stream.device))
        self.in_use[self.in_use.index(number)] = len(self.streams) - 1

    def default(self, number: int) -> bool:
        """Whether a stream was there before the program."""
        return number < (_SIDE + 1) * len(self.subject.indices[:3]) and number % (_SIDE + 1) == 0

    def finish(self) -> None:
        for index in self.subject.indices:
            self.backend.synchronize(index)
        for copy, expected, _ in self.copies:
            assert torch.equal(copy, expected), "a copy to the host holds other values"
        for number, value in enumerate(self.values):
            found = value.tensor.cpu()
            assert torch.equal(found, value.expected), (
                f"value {number} on device {value.device} is not what the promised order makes it"
            )


def run_program(subject: Subject, program: list[Step]) -> None:
    """Run a program and compare all that it made.

    Raises:
        AssertionError: a value is not what the order makes it.
    """
    run = _Run(subject)
    every = [s for s in covering_situations(subject) if s.mode != "inference_mode"] or [Situation()]
    try:
        for step in program:
            if step.situation:
                situation = every[step.situation % len(every)]
                run_in(subject, situation, lambda step=step: run.step(step))  # type: ignore[misc]
            else:
                run.step(step)
        run.finish()
    finally:
        with contextlib.suppress(Exception):
            subject.synchronize_all()
