"""Faults of streams."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import Move, is_from_host


def stream_index(stream: Any) -> int:
    """The index of a stream's device."""
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
        before = self.current_stream(stream_index(stream))
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
            torch.accelerator.set_stream(self.module.default_stream(stream_index(stream)))


@mutant("STR-003")
class OneCurrentForAllThreads(Fault):
    """The current stream is the object's, not the thread's."""

    def __init__(self) -> None:
        self.current: dict[int, Any] = {}

    def current_stream(self, index: int) -> Any:
        return self.current.get(index) or super().current_stream(index)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        index = stream_index(stream)
        before, self.current[index] = self.current_stream(index), stream
        try:
            with super().use_stream(stream):
                yield stream
        finally:
            self.current[index] = before


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
        mine = [alias for alias in self.stack if stream_index(alias) == index]
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
class MoveSynchronizes(Move):
    """`move` waits for the whole device."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        for index in range(self.device_count()):
            self.synchronize(index)
        return moved


@mutant("STR-008")
class UseStopsTheHost(Fault):
    """Leaving `use_stream` waits for the device."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Any:
        with super().use_stream(stream):
            yield stream
        self.synchronize(stream_index(stream))


@mutant("STR-008")
class NewStopsTheHost(Fault):
    """`new_stream` waits for the device."""

    def new_stream(self, index: int) -> Any:
        self.synchronize(index)
        return super().new_stream(index)


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


@mutant("STR-014")
class PinnedCopiesWaitForAll(Move):
    """A copy from pinned memory waits for the whole device first."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if is_from_host(tensor, device) and tensor.is_pinned():
            self.synchronize(device.index or 0)
        return tensor


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
