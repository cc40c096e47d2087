"""Values that streams copy and compute, next to what they must be."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Final

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.program_order import Clock, Order, Stamp, Stream
from anydevice_conformance.program_values import (
    applied,
    apply_in_place,
    first_values,
    part_of,
    value_dtypes,
)
from anydevice_conformance.subject import Subject

__all__ = ["SIDE", "Run", "Value"]

SIDE: Final = 2  # streams next to the default one, of each device
_BUFFER: Final = 70_000  # elements of the buffer that is filled again


@dataclasses.dataclass(eq=False)
class Value:
    """What a stream has made, what it must be, and which work has read it since."""

    tensor: torch.Tensor
    expected: torch.Tensor
    device: int
    home: int  # the stream that was current when it was made
    written: Stamp
    read: list[Stamp] = dataclasses.field(default_factory=list)


class Run(Order):
    """What a program has made, and the work that it can queue."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject.backend)
        self.subject = subject
        for index in subject.indices[:3]:
            self.streams.append(Stream(self.backend.current_stream(index), index))
            for _ in range(SIDE):
                self.streams.append(Stream(self.backend.new_stream(index), index))
        self.pins = subject.capabilities.pinned_memory
        self.dtypes = value_dtypes(subject)
        self.in_use = list(range(len(self.streams)))
        self.values: list[Value] = []
        self.copies: list[tuple[torch.Tensor, torch.Tensor, Stamp]] = []
        self.pinned: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kept: list[Any] = []  # what queued work may still read
        self.buffer: torch.Tensor | None = None
        self.buffer_read: Stamp | None = None

    # ------------------------------------------------------------------ waiting

    def host_knows(self, clock: Clock) -> None:
        """The host has waited for so much: it is done, and all that comes later comes after it.

        Raises:
            AssertionError: a copy to the host that shall be done by now is not there.
        """
        self.all_know(clock)
        for copy, expected, (number, piece) in self.copies:
            if clock.get(number, 0) >= piece:
                assert same_bits(copy, expected), (
                    "a copy to the host is not there, though the host has waited for it"
                )

    def host_waits(self, stamp: Stamp) -> None:
        """The host waits for a piece of work: by an event that is there, or by a new one."""
        event, clock = self.event_after(stamp)
        self.backend.synchronize_event(event)
        self.host_knows(dict(clock))

    def wait_for_all(self, device: int) -> None:
        """The host waits for a device."""
        self.backend.synchronize(device)
        for stream in [stream for stream in self.streams if stream.device == device]:
            self.host_knows(dict(stream.clock))

    # ------------------------------------------------------------------ work

    def on(self, value: Value, number: int) -> int:
        """A stream of a value's device."""
        mine = [n for n in self.in_use if self.streams[n].device == value.device]
        return mine[number % len(mine)]

    def using(self, number: int) -> contextlib.AbstractContextManager[Any]:
        """The stream is the current one."""
        return self.backend.use_stream(self.streams[number].real)

    def add(self, tensor: torch.Tensor, expected: torch.Tensor, number: int) -> None:
        """A new value, which a stream has made."""
        device = self.streams[number].device
        self.values.append(Value(tensor, expected, device, number, self.stamp(number)))

    def upload(self, number: int, seed: int) -> None:
        """A new value, from ordinary or pinned memory, which may be let go of at once."""
        stream, host = self.streams[number], first_values(self.dtypes, seed)
        source = host.clone()
        if self.pins and seed % 2:
            source = self.backend.pin_memory(source)
        if seed % 3:  # else it is let go of at once
            self.kept.append(source)
        with self.using(number):
            tensor = self.subject.put(source, stream.device, non_blocking=True)
        self.add(tensor, host, number)

    def refill(self, number: int, seed: int) -> None:
        """A pinned buffer is filled again as soon as the copy from it is done, and copied again."""
        if not self.pins:
            self.upload(number, seed)
            return
        if self.buffer is None:
            self.buffer = self.backend.pin_memory(torch.zeros(_BUFFER))
        if self.buffer_read is not None:
            self.host_waits(self.buffer_read)
        host = torch.arange(float(_BUFFER)) + len(self.values)
        self.buffer.copy_(host)
        with self.using(number):
            tensor = self.subject.put(self.buffer, self.streams[number].device, non_blocking=True)
        self.add(tensor, host, number)
        self.buffer_read = self.values[-1].written

    def kernel(self, number: int, value: Value, which: int) -> None:
        """An operator, on a stream of the value's device."""
        self.compute(self.on(value, number), value, which)

    def compute(self, number: int, value: Value, which: int) -> None:
        """An operator, on this stream."""
        self.after(number, [value.written])
        with self.using(number):
            tensor, expected = applied(value.tensor, value.expected, which)
        self.add(tensor, expected, number)
        value.read.append(self.values[-1].written)

    def in_place(self, number: int, value: Value, which: int) -> None:
        """A change where the value lies."""
        number = self.on(value, number)
        self.after(number, [value.written, *value.read])
        value.expected = value.expected.clone()  # copies of what it was are compared with it
        with self.using(number), torch.no_grad():
            apply_in_place(value.tensor, which)
        apply_in_place(value.expected, which)
        value.written, value.read = self.stamp(number), []

    def download(self, number: int, value: Value, kept: bool = True) -> None:
        """A copy to the host, which is kept, or let go of while it is queued."""
        number = self.on(value, number)
        self.after(number, [value.written])
        expected = part_of(value.expected, number + len(self.copies))
        with self.using(number):
            part = part_of(value.tensor, number + len(self.copies))
            copy = self.subject.fetch(part, non_blocking=True)
        stamp = self.stamp(number)
        value.read.append(stamp)
        if kept:
            self.copies.append((copy, expected, stamp))
            return
        del copy
        if self.pins:  # whoever gets its memory now gets it for himself
            other = torch.zeros_like(expected)
            self.pinned += [(self.backend.pin_memory(other), other) for _ in range(2)]

    def blocking_download(self, number: int, value: Value) -> None:
        """A copy to the host that is there when it returns."""
        number = self.on(value, number)
        self.after(number, [value.written])
        with self.using(number):
            copy = self.subject.fetch(value.tensor)
        value.read.append(self.stamp(number))
        assert same_bits(copy, value.expected), "a blocking copy to the host is not there"
        self.host_knows(dict(self.streams[number].clock))

    def cross(self, number: int, value: Value, blocking: bool = False) -> None:
        """A copy to another device."""
        stream = self.streams[number]
        if stream.device == value.device:
            self.kernel(number, value, number)
            return
        source, first = self.on(value, number), int(number % 3 == 1 and len(value.expected) > 1)
        # A copy between devices is ordered with the current streams of both.
        self.after(source, [value.written])
        with self.using(source), self.using(number):
            part = value.tensor[first:]
            tensor = self.subject.put(part, stream.device, non_blocking=not blocking)
        self.add(tensor, value.expected[first:], number)
        value.read.append(self.stamp(source))  # what comes later there comes after the copy

    def gradient(self, number: int, value: Value) -> None:
        """A gradient, whose stream is that of its forward, and which is there for the caller's."""
        number, last = self.on(value, number), self.on(value, number + value.home)
        if value.tensor.dtype is not torch.float32:
            self.kernel(number, value, number)
            return
        self.after(number, [value.written])
        with torch.enable_grad():
            with self.using(number):
                leaf = value.tensor.detach().requires_grad_()
                squares = leaf * leaf
            self.after(last, [self.stamp(number)])
            with self.using(last):
                torch.autograd.backward(squares, torch.full_like(squares, 3.0))
        assert leaf.grad is not None, "no gradient came"
        self.kept.append(leaf)
        self.add(leaf.grad, value.expected * 2 * 3, last)
        value.read.append(self.values[-1].written)
        self.values[-1].home = number

    def hold(self, value: Value, found: torch.Tensor) -> None:
        """Whether a value is right."""
        assert same_bits(found, value.expected), (
            f"value {self.values.index(value)} on device {value.device} is not what the promised "
            "order makes it"
        )
