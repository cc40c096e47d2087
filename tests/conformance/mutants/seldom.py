"""Faults that show seldom: in one combination of many, or when a number comes again."""

from __future__ import annotations

import threading

import torch

from anydevice.backend import MemoryInfo
from mutants.gallery import Fault, mutant
from mutants.moving import Move, is_to_host


@mutant("MOV-025", check="test_MOV_025_every_combination")
class TailOfAnOddNumberOfHalvesIsLost(Move):
    """A queued copy to the host is made in words of 4 bytes: an odd last one of 2 is left out."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        odd = source.numel() % 2 == 1 and source.numel() > 1 and source.storage_offset() % 2
        plain = moved.is_contiguous() and not moved.requires_grad
        if is_to_host(source, moved.device) and source.itemsize == 2 and odd and plain:
            self.synchronize(source.device.index)
            moved.view(-1)[-1:] = 0
        return moved


@mutant("DEV-012")
class PinningAgainSharesMemory(Fault):
    """What is pinned already is copied to a buffer that the next of its size gets, too."""

    def __init__(self) -> None:
        self._buffers: dict[object, torch.Tensor] = {}

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_pinned() or not tensor.numel() or tensor.requires_grad:
            return super().pin_memory(tensor)
        key = tensor.dtype, tensor.shape
        if key not in self._buffers:
            self._buffers[key] = tensor.clone().pin_memory()
        return self._buffers[key].copy_(tensor)


@mutant("DEV-012")
class LocalDeviceMakesItCurrent(Fault):
    """`local_device` makes the rank's device the current one."""

    def local_device(self, local_rank: int) -> int:
        index = super().local_device(local_rank)
        self.module.set_device(index)
        return index


@mutant("STR-011")
class EventsAreKnownByTheirAddress(Fault):
    """A stream that waited for an event does not wait for another one at the same address."""

    def __init__(self) -> None:
        self._waited: set[object] = set()

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        key = stream.device.index, stream.stream_id, id(event)
        if key not in self._waited:
            self._waited.add(key)
            super().wait_event(stream, event)


@mutant("OOM-006")
class NoRoomMakesItCurrent(Fault):
    """A move without room leaves another device the current one."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        try:
            return super().move(tensor, device, non_blocking=non_blocking)
        except torch.OutOfMemoryError:
            self.module.set_device(1)
            raise


@mutant("MOV-025")
class SmallFloatsOfThreadsAreRounded(Move):
    """In a thread, without gradients, the last of several float8 numbers is lost to the host."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        alone = threading.current_thread() is threading.main_thread()
        small = moved.itemsize == 1 and moved.is_floating_point() and moved.numel() > 1
        if alone or not small or not is_to_host(source, moved.device) or torch.is_grad_enabled():
            return moved
        self.synchronize(source.device.index)
        bits = moved.clone(memory_format=torch.contiguous_format).view(torch.uint8)
        bits.view(-1)[-1:].bitwise_not_()
        return bits.view(moved.dtype)


@mutant("MOV-014")
class PageableSourcesAreReadLater(Move):
    """A queued copy from pageable memory reads its source when something is next asked for."""

    def __init__(self) -> None:
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def instead(
        self, tensor: torch.Tensor, device: torch.device, non_blocking: bool
    ) -> torch.Tensor | None:
        for staged, source in self._late:
            staged.copy_(source)
        self._late.clear()
        plain = type(tensor) is torch.Tensor and tensor.dtype is torch.float32
        plain = plain and not (tensor.requires_grad or tensor.is_neg() or tensor.is_inference())
        if not non_blocking or not plain or tensor.device.type != "cpu" or tensor.is_pinned():
            return None
        if device.type == "cpu" or not tensor.numel() or torch.is_inference_mode_enabled():
            return None
        staged = super().pin_memory(tensor)
        self._late.append((staged, tensor))
        return self.rightly(staged, device, non_blocking=True)


@mutant("DEV-012")
class StreamsOfTheDeviceInUse(Fault):
    """While a side stream is current, a new stream is one of its device, whatever was asked."""

    def new_stream(self, index: int) -> torch.Stream:
        current = self.module.current_device()
        side = self.module.current_stream(current) != self.module.default_stream(current)
        return super().new_stream(current if side else index)


@mutant("DEV-012")
class WaitsAreSkippedSeldom(Fault):
    """Each two hundredth time an event is not waited for."""

    def __init__(self) -> None:
        self._times = 0

    def synchronize_event(self, event: torch.Event) -> None:
        self._times += 1
        if self._times % 200:
            super().synchronize_event(event)


@mutant("MEM-007")
class AFullDeviceTellsTheOthersMemory(Fault):
    """Where little is free, what is told is the other device's."""

    def memory_info(self, index: int) -> MemoryInfo:
        found = super().memory_info(index)
        return found if found.free > found.total // 5 else super().memory_info(1 - index)


@mutant("OOM-004")
class TheLastErrorIsKept(Fault):
    """The last lack of memory is kept for the log, and with it the tensors of its frames."""

    last: BaseException | None = None

    def is_out_of_memory(self, error: BaseException) -> bool:
        found = super().is_out_of_memory(error)
        self.last = error if found else self.last
        return found


@mutant("STR-018")
class LargeResultsWaitForTheDevice(Fault):
    """A large move to the host waits for all streams of the device."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if is_to_host(tensor, device) and tensor.nbytes > 1 << 20:
            self.synchronize(tensor.device.index)
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("PIN-003")
class LargeCopiesOnSideStreamsWait(Fault):
    """A queued copy of much pinned memory waits for its stream, where that is a side stream."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        if moved.device.type != "cpu" and tensor.nbytes > 1 << 20 and tensor.is_pinned():
            stream = self.module.current_stream(device)
            if stream != self.module.default_stream(device):
                stream.synchronize()
        return moved


@mutant("PIN-005")
class PinningMakesContiguous(Fault):
    """What is pinned loses its memory format."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().pin_memory(tensor.contiguous())
