"""Faults of streams that disturb each other: by what is pending, and by how they are used."""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import is_from_host, is_to_host


@mutant("STR-001")
class EachThreadBeginsThePool(Fault):
    """New streams are handed out from a pool's beginning in each thread."""

    def __init__(self) -> None:
        self._pool: dict[int, list[Any]] = {}
        self._turns = threading.local()

    def new_stream(self, index: int) -> Any:
        pool = self._pool.setdefault(index, [])
        turn = vars(self._turns).get(str(index), 0)
        setattr(self._turns, str(index), (turn + 1) % 20)
        while len(pool) <= turn:
            pool.append(super().new_stream(index))
        return pool[turn]


@mutant("STR-003")
class CurrentIsWhatWasUsed(Fault):
    """`current_stream` knows what `use_stream` made current, and nothing that torch did."""

    def __init__(self) -> None:
        self._used = threading.local()

    def current_stream(self, index: int) -> Any:
        return vars(self._used).get(str(index)) or self.module.default_stream(index)

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        index = stream.device.index
        before, real = vars(self._used).get(str(index)), self.module.current_stream(index)
        with self._anydevice_on(index):
            self.module.set_stream(stream)
            setattr(self._used, str(index), stream)
            try:
                yield stream
            finally:
                self.module.set_stream(real)
                setattr(self._used, str(index), before)


@mutant("STR-018")
class ContextsJoin(Fault):
    """What is current again after `use_stream` waits for the stream that was used."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        before = self.module.current_stream(stream.device.index)
        with super().use_stream(stream):
            yield stream
        if before != stream:
            before.wait_stream(stream)


@mutant("STR-018")
class DirectionsShareAnEngine(Fault):
    """A copy to the device waits for the last copy to the host, on whatever stream."""

    def __init__(self) -> None:
        self._last: dict[int, Any] = {}

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        index = device.index or 0
        if is_from_host(tensor, device) and non_blocking and index in self._last:
            self.module.current_stream(index).wait_event(self._last[index])
        found = super().move(tensor, device, non_blocking=non_blocking)
        if is_to_host(tensor, device) and non_blocking:
            here = tensor.device.index
            self._last[here] = self.module.current_stream(here).record_event()
        return found


@mutant("STR-018")
class ManyCopiesStopTheHost(Fault):
    """The 65th copy that is pending on a stream waits for those before."""

    def __init__(self) -> None:
        self._pending: Any = collections.defaultdict(collections.deque)

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if not (is_from_host(tensor, device) and non_blocking and tensor.is_pinned()):
            return super().move(tensor, device, non_blocking=non_blocking)
        stream = self.module.current_stream(device.index or 0)
        pending = self._pending[stream.device.index, stream.stream_id]
        while pending and pending[0].query():
            pending.popleft()
        if len(pending) >= 64:
            stream.synchronize()
        found = super().move(tensor, device, non_blocking=True)
        pending.append(stream.record_event())
        return found


@mutant("STR-018")
class ErrorsWaitForTheStream(Fault):
    """`use_stream` that an exception leaves waits for its stream."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        with super().use_stream(stream):
            try:
                yield stream
            except BaseException:
                stream.synchronize()
                raise


@mutant("STR-011")
class EventsComeFromARing(Fault):
    """While 256 events of a stream live, the next one is the oldest of them."""

    def __init__(self) -> None:
        self._ring: Any = collections.defaultdict(lambda: collections.deque(maxlen=256))

    def record_event(self, stream: Any) -> Any:
        ring = self._ring[stream.device.index, stream.stream_id]
        oldest = ring[0]() if len(ring) == 256 else None
        if oldest is not None:
            ring.rotate(-1)
            return oldest
        event = super().record_event(stream)
        ring.append(weakref.ref(event))
        return event


@mutant("STR-004")
class ManyWaitsAreDropped(Fault):
    """While 64 waits of a stream are pending, it waits for nothing more."""

    def __init__(self) -> None:
        self._waits: Any = collections.defaultdict(list)

    def wait_event(self, stream: Any, event: Any) -> None:
        key = stream.device.index, stream.stream_id
        self._waits[key] = [one for one in self._waits[key] if not one.query()]
        if len(self._waits[key]) < 64:
            self._waits[key].append(event)
            super().wait_event(stream, event)


@mutant("PIN-002", check="test_PIN_005_dtypes_and_layouts")
class TheOriginalIsRegistered(Fault):
    """A large tensor is pinned where it is: the result has its memory."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = super().pin_memory(tensor)
        owns = not tensor.storage_offset() and tensor.untyped_storage().nbytes() == tensor.nbytes
        plain = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_inference()
        if plain and owns and tensor.nbytes >= 1 << 20 and not pinned.is_inference():
            tensor.set_(pinned.untyped_storage(), 0, tensor.shape, tensor.stride())
        return pinned
