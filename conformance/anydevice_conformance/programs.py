"""Random programs of copies, kernels and waits over streams, threads and devices.

A program does each thing that the order of `program_order` allows, waits where it must, and holds
every value that comes of it against what that order makes of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import same_bits
from anydevice_conformance.program_order import Stream
from anydevice_conformance.program_run import SIDE, Run, Value
from anydevice_conformance.program_steps import Step
from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject

__all__ = ["run_program"]

_MANY: Final = 12  # events at once: more than a small pool of them has
_CROWD: Final = 300  # events at once: more than a large pool of them has


class _Program(Run):
    def step(self, step: Step) -> None:
        number = self.in_use[step.stream % len(self.in_use)]
        of_streams: dict[str, Callable[[], object]] = {
            "upload": lambda: self.upload(number, step.value),
            "refill": lambda: self.refill(number, step.value),
            "record": lambda: self.record_many(number, _MANY),
            "record a crowd": lambda: self.record_many(number, _CROWD),
            "host waits": lambda: self.host_waits(self.stamp(number)),
            "wait for all": lambda: self.wait_for_all(self.streams[number].device),
            "wait for its own": lambda: self.wait_for_own(number),
            "other members": lambda: self.other_members(self.streams[number].device),
            "retire": lambda: self.retire(number),
        }
        of_values: dict[str, Callable[[int, Value], None]] = {
            "kernel": partial(self.kernel, which=step.value + step.stream),
            "in place": partial(self.in_place, which=step.stream),
            "download": self.download,
            "download, let go": partial(self.download, kept=False),
            "blocking download": self.blocking_download,
            "cross": self.cross,
            "blocking cross": partial(self.cross, blocking=True),
            "gradient": self.gradient,
            "let go": self.let_go,
            "let go with its stream": self.let_go_with_stream,
        }
        if step.kind in of_streams:
            of_streams[step.kind]()
        elif not self.values:
            self.upload(number, step.value)
        else:
            of_values[step.kind](number, self.values[step.value % len(self.values)])
        last = self.values[-1].written[0] if self.values else 0
        if step.value % 3 == 0 and self.streams[last].real is not None:
            self.record(last)  # an event that is waited for later, if at all

    # ------------------------------------------------------------------ what comes and goes

    def let_go(self, number: int, value: Value) -> None:
        """Its memory is used again on the stream that asked for it: after all that was done."""
        self.after(value.home, [value.written, *value.read])
        self.values = [other for other in self.values if other is not value]

    def let_go_with_stream(self, number: int, value: Value) -> None:
        """Its memory is used again after the streams that the allocator has been told of."""
        number = self.on(value, number)
        try:
            for stream in {number, value.written[0], *(stream for stream, _ in value.read)}:
                if self.streams[stream].real is None:  # nobody can tell of one that is gone
                    raise NotImplementedError
                value.tensor.record_stream(self.streams[stream].real)
        except NotImplementedError:  # the device has none
            self.let_go(number, value)
            return
        self.compute(number, value, number)
        home, shape, dtype = value.home, value.expected.shape, value.expected.dtype
        self.values = [other for other in self.values if other is not value]
        del value
        for _ in range(2):
            with self.using(home):
                again = torch.ones(shape, dtype=dtype, device=self.values[-1].tensor.device)
            self.add(again, torch.ones(shape, dtype=dtype), home)

    def record_many(self, number: int, count: int) -> None:
        for _ in range(count):
            self.record(number)
        if count > _MANY:  # all but the last one go again
            del self.events[-count:-1]

    def other_members(self, device: int) -> None:
        """Members that change no order and spoil no work."""
        self.backend.empty_cache(device)
        for ask in (self.backend.memory_info, self.backend.memory_allocated):
            with contextlib.suppress(NotImplementedError):
                ask(device)
        self.backend.device_name(device)
        self.backend.current_stream(device)
        if self.pins:
            self.backend.pin_memory(torch.zeros(_MANY))
        with self.backend.use_stream(self.backend.new_stream(device)):
            torch.zeros(_CROWD, device=self.subject.device(device))

    def retire(self, number: int) -> None:
        """A side stream goes while its work is queued, which is done all the same."""
        stream = self.streams[number]
        if self.default(number) or any(value.home == number for value in self.values):
            return  # memory is used again on the stream that asked for it: that must be there
        self.record(number)
        stream.real = None
        self.streams.append(Stream(self.backend.new_stream(stream.device), stream.device))
        self.in_use[self.in_use.index(number)] = len(self.streams) - 1

    def default(self, number: int) -> bool:
        """Whether a stream was there before the program."""
        return number < (SIDE + 1) * len(self.subject.indices[:3]) and number % (SIDE + 1) == 0

    def finish(self) -> None:
        # What came last is asked for first, and alone: only what it waits for is surely done.
        for copy, expected, stamp in self.copies[:-4:-1]:
            if self.streams[stamp[0]].real is not None:
                self.backend.synchronize_event(self.event_after(stamp)[0])
                assert same_bits(copy, expected), "a copy to the host is not there after its event"
        for value in reversed(self.values):
            if self.streams[value.written[0]].real is not None:
                with self.using(value.written[0]):
                    self.hold(value, self.subject.fetch(value.tensor))
        for index in self.subject.indices:
            self.backend.synchronize(index)
        for copy, expected, _ in self.copies:
            assert same_bits(copy, expected), "a copy to the host holds other values"
        for pinned, expected in self.pinned:
            assert same_bits(pinned, expected), "PIN-002: pinned memory was written by another copy"
        for value in self.values:
            self.hold(value, value.tensor.cpu())


def run_program(subject: Subject, program: list[Step]) -> None:
    """Run a program and compare all that it made.

    Raises:
        AssertionError: a value is not what the order makes it.
    """
    run = _Program(subject)
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
