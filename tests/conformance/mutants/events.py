"""Faults of events, and of the order that they give."""

from __future__ import annotations

from typing import Any

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import MaybeMoved, Move, is_to_host
from mutants.streams import stream_index


@mutant("STR-004")
class WaitDoesNothing(Fault):
    """`wait_event` does not wait."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Do nothing."""


@mutant("STR-004")
class RecordsOnTheCurrent(Fault):
    """`record_event` records on the current stream, whatever stream it is given."""

    def record_event(self, stream: Any) -> Any:
        return super().record_event(self.current_stream(stream_index(stream)))


@mutant("STR-004")
class TheCurrentWaits(Fault):
    """`wait_event` has the current stream wait, whatever stream it is given."""

    def wait_event(self, stream: Any, event: Any) -> None:
        super().wait_event(self.current_stream(stream_index(stream)), event)


@mutant("STR-004")
class RecordsNothing(Fault):
    """`record_event` makes an event and does not record it."""

    def record_event(self, stream: Any) -> Any:
        return torch.Event(device=stream.device)


@mutant("STR-005")
class CopiesOnTheDefault(Move):
    """Non-blocking copies to the device go to the default stream, whatever is current."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if not non_blocking or device.type != self.device_type:
            return None
        with self.module.default_stream(device.index or 0):
            return self.rightly(tensor, device, non_blocking)


@mutant("STR-006")
class FetchesOnTheDefault(Move):
    """Non-blocking copies to the host go to the default stream, whatever is current."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if not non_blocking or not is_to_host(tensor, device):
            return None
        with self.module.default_stream(tensor.device.index or 0):
            return self.rightly(tensor, device, non_blocking)


@mutant("STR-008")
class WaitStopsTheHost(Fault):
    """`wait_event` has the host wait."""

    def wait_event(self, stream: Any, event: Any) -> None:
        event.synchronize()


@mutant("STR-008")
class RecordStopsTheHost(Fault):
    """`record_event` waits for the stream."""

    def record_event(self, stream: Any) -> Any:
        event = super().record_event(stream)
        event.synchronize()
        return event


class _LateEvent:
    """An event that is recorded when somebody asks for it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def _now(self) -> Any:
        event = torch.Event(device=self.stream.device)
        event.record(self.stream)
        return event

    def query(self) -> bool:
        return bool(self._now().query())


@mutant("STR-009")
class RecordsLate(Fault):
    """An event is recorded when somebody waits for it."""

    def record_event(self, stream: Any) -> Any:
        return _LateEvent(stream)

    def wait_event(self, stream: Any, event: Any) -> None:
        super().wait_event(stream, event._now())


@mutant("STR-011")
class EventsAreUsedUp(Fault):
    """Only the first who waits for an event waits."""

    def __init__(self) -> None:
        self.used: set[int] = set()
        self.events: list[Any] = []

    def wait_event(self, stream: Any, event: Any) -> None:
        if id(event) not in self.used:
            self.used.add(id(event))
            self.events.append(event)
            super().wait_event(stream, event)


@mutant("STR-011")
class PassedEventsFail(Fault):
    """Waiting for an event that has passed is an error."""

    def wait_event(self, stream: Any, event: Any) -> None:
        if event.query():
            raise RuntimeError("event was destroyed")
        super().wait_event(stream, event)


@mutant("STR-013")
class NoWaitAcrossDevices(Fault):
    """An event of another device is not waited for."""

    def wait_event(self, stream: Any, event: Any) -> None:
        if event.device == stream.device:
            super().wait_event(stream, event)


@mutant("STR-013")
class AcrossDevicesFails(Fault):
    """Waiting for an event of another device is an error."""

    def wait_event(self, stream: Any, event: Any) -> None:
        if event.device != stream.device:
            raise RuntimeError("event and stream are of different devices")
        super().wait_event(stream, event)


@mutant("STR-016")
class EventsAreNotWaitedFor(Fault):
    """`synchronize_event` returns at once."""

    def synchronize_event(self, event: Any) -> None:
        pass
