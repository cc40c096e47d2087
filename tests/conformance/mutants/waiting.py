"""Faults of who waits for what, and of what is kept until somebody waits."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mutants.gallery import Fault, mutant, patched
from mutants.kernels import Kernel
from mutants.moving import MaybeMoved, Move, is_from_host, is_to_host


@mutant("STR-002")
class ErrorsAreRenamed(Fault):
    """A RuntimeError that leaves `use_stream` becomes one that names the stream."""

    @contextlib.contextmanager
    def use_stream(self, stream: Any) -> Iterator[Any]:
        with super().use_stream(stream):
            try:
                yield stream
            except RuntimeError as error:
                raise RuntimeError(f"on stream {stream.stream_id}: {error}") from error


@mutant("STR-002")
class TheStreamOfTheCallComesBack(Fault):
    """What `use_stream` puts back is what was current when it was called."""

    def use_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        before = self.current_stream(stream.device.index)
        return self._using(stream, before)

    @contextlib.contextmanager
    def _using(self, stream: Any, before: Any) -> Iterator[Any]:
        device = self.module.current_device()
        self.module.set_stream(stream)
        try:
            yield stream
        finally:
            self.module.set_stream(before)
            self.module.set_device(device)


@mutant("STR-008")
class NewStreamsFollowTheCurrent(Fault):
    """A new stream begins after what the current one has queued."""

    def new_stream(self, index: int) -> Any:
        stream = super().new_stream(index)
        stream.wait_stream(self.module.current_stream(index))
        return stream


@mutant("STR-008")
class ManyPendingEventsStopTheHost(Fault):
    """The 100th event that is pending on a stream waits for the first."""

    def __init__(self) -> None:
        self._pending: Any = collections.defaultdict(collections.deque)

    def record_event(self, stream: Any) -> Any:
        pending = self._pending[stream.device.index, stream.stream_id]
        while pending and pending[0].query():
            pending.popleft()
        if len(pending) >= 99:
            pending.popleft().synchronize()
        pending.append(super().record_event(stream))
        return pending[-1]


@mutant("STR-017")
class StreamsAreNotRecorded(Fault):
    """`record_stream` does nothing: memory is used again while another stream still reads it."""

    def patches(self) -> list[Any]:
        return [patched(torch.Tensor, "record_stream", lambda real: lambda tensor, stream: None)]


@mutant("STR-017")
class SynchronizeForgetsEvents(Fault):
    """After `synchronize` of any device all earlier events count as passed."""

    def __init__(self) -> None:
        self._times = 0
        self._recorded: Any = weakref.WeakKeyDictionary()

    def synchronize(self, index: int) -> None:
        super().synchronize(index)
        self._times += 1

    def record_event(self, stream: Any) -> Any:
        event = super().record_event(stream)
        self._recorded[event] = self._times
        return event

    def wait_event(self, stream: Any, event: Any) -> None:
        if self._recorded.get(event, self._times) >= self._times:
            super().wait_event(stream, event)


@mutant("STR-017")
class SortsOnTheDefaultStream(Fault):
    """One operator is queued on the default stream, whichever is current."""

    def patches(self) -> list[Any]:
        def sort(tensor: torch.Tensor, real: Any, *args: Any, **options: Any) -> Any:
            if tensor.device.type != self.device_type:
                return real(tensor, *args, **options)
            with self.module.default_stream(tensor.device.index):
                return real(tensor, *args, **options)

        return [
            patched(torch.Tensor, "sort", lambda real: lambda t, *a, **k: sort(t, real, *a, **k))
        ]


@mutant("STR-017")
class NormsOnTheDefaultStream(Kernel):
    """Another one: a norm, which no small program would call."""

    operations = ("native_layer_norm",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.module.default_stream(args[0].device.index):
            return real(*args, **kwargs)


@mutant("MOV-019")
class ThreadsShareAStagingBuffer(Move):
    """Blocking uploads of what is large go through one pinned buffer, whoever asks."""

    def __init__(self) -> None:
        self._buffer: list[torch.Tensor] = []

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        large = 1 << 16 <= tensor.nbytes <= 1 << 21 and tensor.is_contiguous()
        plain = tensor.dtype is torch.float32 and not tensor.requires_grad
        if not large or not plain or not is_from_host(tensor, device) or tensor.is_pinned():
            return None
        if non_blocking or tensor.is_inference() or torch.is_inference_mode_enabled():
            return None
        if not self._buffer:
            self._buffer.append(torch.empty(1 << 19, device="cpu", pin_memory=True))
        part = self._buffer[0][: tensor.numel()]
        part.copy_(tensor.view(-1))
        moved = self.rightly(part.view(tensor.shape), device, True)
        self.current_stream(device.index or 0).synchronize()
        return moved


@mutant("STR-018")
class StridedUploadsWaitForTheDevice(Move):
    """A blocking upload of what is not contiguous waits for all streams."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if is_from_host(tensor, device) and not tensor.is_contiguous():
            self.synchronize(device.index or 0)
        return tensor


@mutant("PIN-003")
class PartsOfPinnedMemoryBlock(Move):
    """A non-blocking copy from the middle of pinned memory stops the host."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if is_from_host(source, moved.device) and source.storage_offset() and source.is_pinned():
            self.current_stream(moved.device.index).synchronize()
        return moved


@mutant("PIN-004")
class PinnedUntilSynchronize(Move):
    """Pinned sources are kept until the device is synchronised."""

    def __init__(self) -> None:
        self._kept: Any = collections.defaultdict(list)

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if is_from_host(source, moved.device) and source.is_pinned():
            self._kept[moved.device.index].append(source.detach())
        return moved

    def synchronize(self, index: int) -> None:
        super().synchronize(index)
        self._kept[index].clear()


@mutant("PIN-004")
class PinnedMemoryHoldsItself(Fault):
    """What is pinned is freed only when Python collects its garbage."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = super().pin_memory(tensor)
        if pinned is not tensor:
            pinned._owner = pinned  # type: ignore[attr-defined]
        return pinned


@mutant("PIN-004")
class FetchesGiveTheirMemoryAway(Move):
    """Pinned memory that a queued copy to the host will write is handed out again."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        plain = tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.numel() > 64
        late = non_blocking and is_to_host(tensor, device) and not tensor.requires_grad
        if not plain or not late or tensor.is_inference() or torch.is_inference_mode_enabled():
            return None
        block = torch.empty(tensor.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        block.view(torch.float32).view(tensor.shape).copy_(tensor, non_blocking=True)
        memory = block.numpy()
        weakref.finalize(memory, self._give_back, block)
        return torch.from_numpy(memory).view(torch.float32).view(tensor.shape)

    def _give_back(self, block: torch.Tensor) -> None:
        self._free[block.nbytes] = [block]

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        free = self._free.get(tensor.nbytes)
        plain = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_pinned()
        if not free or not plain or torch.is_inference_mode_enabled():
            return super().pin_memory(tensor)
        return free.pop().view(tensor.dtype).view(tensor.shape).copy_(tensor)


@mutant("PIN-005")
class TheWholeStorageIsPinned(Fault):
    """Of a view the whole memory is pinned."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        part = tensor.nbytes and tensor.nbytes < storage.nbytes() < 1 << 24
        plain = tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_inference()
        if not part or not plain or tensor.is_pinned() or tensor.is_conj() or tensor.is_neg():
            return super().pin_memory(tensor)
        whole = super().pin_memory(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        found = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return found.set_(
            whole.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
        )
