"""Faults of streams and events."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from anydevice_conformance.mutants.gallery import Fault, mutant


def _index(stream: Any) -> int:
    return int(stream.device.index or 0)


@mutant("STR-001")
class NewIsCurrent(Fault):
    """`new_stream` gives the current stream."""

    def new_stream(self, index: int) -> Any:
        return self.current_stream(index)


@mutant("STR-001")
class NewIsAlwaysTheSame(Fault):
    """`new_stream` gives one side stream a device."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}

    def new_stream(self, index: int) -> Any:
        return self.streams.setdefault(index, super().new_stream(index))


@mutant("STR-002")
class UseDoesNothing(Fault):
    """`use_stream` leaves the current stream as it is."""

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)


@mutant("STR-002")
class UseNeverEnds(Fault):
    """The stream stays the current one."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        torch.accelerator.set_stream(stream)
        yield stream


@mutant("STR-002")
class UseEndsWithoutException(Fault):
    """After an exception the stream stays the current one."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        before = self.current_stream(_index(stream))
        torch.accelerator.set_stream(stream)
        yield stream
        torch.accelerator.set_stream(before)


@mutant("STR-002")
class UseEndsAtTheDefault(Fault):
    """On leaving, the default stream becomes the current one, not the one before."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        torch.accelerator.set_stream(stream)
        try:
            yield stream
        finally:
            torch.accelerator.set_stream(self.module.default_stream(_index(stream)))


@mutant("STR-003")
class OneCurrentForAllThreads(Fault):
    """The current stream is the object's, not the thread's."""

    def __init__(self) -> None:
        self.current: dict[int, Any] = {}

    def current_stream(self, index: int) -> Any:
        return self.current.get(index) or super().current_stream(index)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        index = _index(stream)
        before, self.current[index] = self.current_stream(index), stream
        try:
            with super().use_stream(stream):
                yield stream
        finally:
            self.current[index] = before


@mutant("STR-004")
class WaitDoesNothing(Fault):
    """`wait_event` does not wait."""

    def wait_event(self, stream: Any, event: Any) -> None:
        """Do nothing."""


@mutant("STR-004")
class RecordsOnTheCurrent(Fault):
    """`record_event` records on the current stream, whatever stream it is given."""

    def record_event(self, stream: Any) -> Any:
        return super().record_event(self.current_stream(_index(stream)))


@mutant("STR-004")
class TheCurrentWaits(Fault):
    """`wait_event` has the current stream wait, whatever stream it is given."""

    def wait_event(self, stream: Any, event: Any) -> None:
        super().wait_event(self.current_stream(_index(stream)), event)


@mutant("STR-004")
class RecordsNothing(Fault):
    """`record_event` makes an event and does not record it."""

    def record_event(self, stream: Any) -> Any:
        return torch.Event(device=stream.device)


@mutant("STR-005")
class CopiesOnTheDefault(Fault):
    """Non-blocking copies to the device go to the default stream, whatever is current."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if not non_blocking or device.type != self.device_type:
            return super().move(tensor, device, non_blocking=non_blocking)
        with self.module.default_stream(device.index or 0):
            return super().move(tensor, device, non_blocking=True)


@mutant("STR-006")
class FetchesOnTheDefault(Fault):
    """Non-blocking copies to the host go to the default stream, whatever is current."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if not non_blocking or device.type != "cpu":
            return super().move(tensor, device, non_blocking=non_blocking)
        with self.module.default_stream(tensor.device.index or 0):
            return super().move(tensor, device, non_blocking=True)


class _Alias:
    """A stream object of its own that stands for the default stream."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.device = real.device


@mutant("STR-007")
class SecretlyTheDefault(Fault):
    """A new stream is another object, and its work runs on the default stream."""

    def __init__(self) -> None:
        self.stack: list[_Alias] = []

    def new_stream(self, index: int) -> Any:
        return _Alias(self.module.default_stream(index))

    def current_stream(self, index: int) -> Any:
        mine = [alias for alias in self.stack if _index(alias) == index]
        return mine[-1] if mine else super().current_stream(index)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        if not isinstance(stream, _Alias):
            with super().use_stream(stream):
                yield stream
            return
        self.stack.append(stream)
        try:
            yield stream
        finally:
            self.stack.pop()

    def record_event(self, stream: Any) -> Any:
        return super().record_event(getattr(stream, "real", stream))

    def wait_event(self, stream: Any, event: Any) -> None:
        super().wait_event(getattr(stream, "real", stream), event)


@mutant("STR-007")
class MoveSynchronizes(Fault):
    """`move` waits for the whole device."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        for index in range(self.device_count()):
            self.synchronize(index)
        return moved


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


@mutant("STR-008")
class UseStopsTheHost(Fault):
    """Leaving `use_stream` waits for the device."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        with super().use_stream(stream):
            yield stream
        self.synchronize(_index(stream))


@mutant("STR-008")
class NewStopsTheHost(Fault):
    """`new_stream` waits for the device."""

    def new_stream(self, index: int) -> Any:
        self.synchronize(index)
        return super().new_stream(index)


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


@mutant("STR-010")
class SynchronizesTheCurrent(Fault):
    """`synchronize` waits for the current stream only."""

    def synchronize(self, index: int) -> None:
        self.current_stream(index).synchronize()


@mutant("STR-010")
class SynchronizesTheDefault(Fault):
    """`synchronize` waits for the default stream only."""

    def synchronize(self, index: int) -> None:
        self.module.default_stream(index).synchronize()


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


@mutant("STR-012")
class StreamsOfTheFirst(Fault):
    """Every new stream is one of device 0."""

    def new_stream(self, index: int) -> Any:
        return super().new_stream(0)


@mutant("STR-012")
class CurrentOfTheFirst(Fault):
    """`current_stream` ignores its index."""

    def current_stream(self, index: int) -> Any:
        return super().current_stream(0)


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


@mutant("STR-014")
class PinnedCopiesWaitForAll(Fault):
    """A copy from pinned memory waits for the whole device first."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if tensor.device.type == "cpu" and device.type != "cpu" and tensor.is_pinned():
            self.synchronize(device.index or 0)
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("STR-015")
class StreamsKeepMemory(Fault):
    """Each stream keeps a workspace on the device."""

    def __init__(self) -> None:
        self.workspaces: list[torch.Tensor] = []

    def new_stream(self, index: int) -> Any:
        self.workspaces.append(torch.zeros(16_384, device=self.device(index)))
        return super().new_stream(index)


@mutant("STR-015")
class FewStreams(Fault):
    """There are sixteen streams, and then an error."""

    made = 0

    def new_stream(self, index: int) -> Any:
        self.made += 1
        if self.made > 16:
            raise RuntimeError("no more hardware queues")
        return super().new_stream(index)


@mutant("STR-016")
class EventsAreNotWaitedFor(Fault):
    """`synchronize_event` returns at once."""

    def synchronize_event(self, event: Any) -> None:
        pass
