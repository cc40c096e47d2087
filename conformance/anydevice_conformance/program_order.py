"""The order that the specification promises: which work of which stream is done before which.

Each stream knows which work of the others is done before its next (a vector clock). A wait is
added exactly where the model says that one is needed, so that every wait counts: one that does not
wait gives a wrong value.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from anydevice.backend import DeviceBackend

__all__ = ["Clock", "Order", "Stamp", "Stream"]

Stamp = tuple[int, int]  # a stream, and which piece of its work
Clock = dict[int, int]  # a stream, and how many pieces of its work are done


@dataclasses.dataclass
class Stream:
    """A stream, and how much of each stream's work is done before its next."""

    real: Any
    device: int
    clock: Clock = dataclasses.field(default_factory=dict)


class Order:
    """Streams, events, and what is done before what."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        self.streams: list[Stream] = []
        self.events: list[tuple[Any, Clock]] = []

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
            event, clock = self.event_after((other, piece))
            self.backend.wait_event(stream.real, event)
            self.know(stream, clock)
            del event

    def event_after(self, stamp: Stamp) -> tuple[Any, Clock]:
        """An event after a piece of work: one that is there, or a new one."""
        number, piece = stamp
        for event, clock in self.events:  # the oldest: long after it was recorded
            if clock.get(number, 0) >= piece:
                return event, clock
        found = self.record(number)
        if piece % 2:  # waited for once, and gone
            self.events.pop()
        return found

    def record(self, number: int) -> tuple[Any, Clock]:
        """An event of a stream, with what is done before it."""
        stream = self.streams[number]
        self.events.append((self.backend.record_event(stream.real), dict(stream.clock)))
        return self.events[-1]

    def know(self, stream: Stream, clock: Clock) -> None:
        """What is queued on a stream from now on comes after so much of the others' work."""
        for one, done in clock.items():
            stream.clock[one] = max(stream.clock.get(one, 0), done)

    def all_know(self, clock: Clock) -> None:
        """The host has waited for so much: all that is queued later comes after it."""
        for stream in self.streams:
            self.know(stream, clock)

    def wait_for_own(self, number: int) -> None:
        """A stream waits for an event of its own, which changes nothing."""
        stream = self.streams[number]
        event, _ = self.record(number)
        for _ in range(2):
            self.backend.wait_event(stream.real, event)
