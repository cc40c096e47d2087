"""Faults that show seldom: in one combination of many, or when a number comes again."""

from __future__ import annotations

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import Move, is_to_host


@mutant("MOV-025")
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
