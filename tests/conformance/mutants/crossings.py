"""Faults of what comes again, of what is large, of what crosses, and of what waits elsewhere."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch

from mutants.gallery import Fault, mutant, patched
from mutants.moving import MaybeMoved, Move, is_from_host, is_to_host


@mutant("MOV-026")
class RowsAreNotRepeated(Move):
    """Between devices, of what is expanded over its first dimension only the first row arrives."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        crosses = source.device.type == moved.device.type and not moved.requires_grad
        if crosses and moved.dim() and moved.shape[0] > 1 and source.stride(0) == 0:
            with torch.inference_mode(moved.is_inference()):
                moved = moved.contiguous()
                moved[1:].zero_()
        return moved


@mutant("MOV-025", check="test_MOV_025_every_combination")
class EqualScalarsAreOne(Move):
    """Of the scalars that are equal only the first one goes to the device."""

    def __init__(self) -> None:
        self._known = weakref.WeakValueDictionary[object, torch.Tensor]()

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        plain = tensor.dim() == 0 and not tensor.requires_grad and not tensor.is_inference()
        if not is_from_host(tensor, device) or not plain or tensor.dtype is not torch.int32:
            return None
        key = tensor.item(), device, torch.is_inference_mode_enabled()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.rightly(tensor, device)
        return found


@mutant("MOV-025", check="test_MOV_025_every_combination")
class LargeMovesEndAtAPage(Move):
    """What is larger than 16 MiB is copied up to its last full page."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        left = moved.nbytes % 4096 // moved.itemsize
        plain = moved.is_contiguous() and not moved.requires_grad and not moved.is_inference()
        if is_from_host(source, moved.device) and plain and moved.nbytes > 1 << 24 and left:
            moved.view(-1)[-left:].zero_()
        return moved


@mutant("MOV-025", check="test_MOV_025_every_combination")
class ActivationsLoseTheirGraph(Move):
    """A vector that was computed requires a gradient on the device, which does not go back."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.is_leaf or not moved.requires_grad or moved.dim() != 1:
            return moved
        return moved.detach().requires_grad_()


@mutant("PIN-005")
class PartsOfPinnedMemoryBeginAtItsStart(Fault):
    """A part of what is pinned already comes back as the beginning of that memory."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        part = tensor.numel() and tensor.storage_offset() and tensor.is_contiguous()
        if not part or tensor.requires_grad or not tensor.is_pinned():
            return super().pin_memory(tensor)
        return tensor.as_strided(tensor.shape, tensor.stride(), 0)


@mutant("STR-018")
class WaitsForOtherDevicesStopTheHost(Fault):
    """An event of another device is waited for by the host."""

    def wait_event(self, stream: torch.Stream, event: torch.Event) -> None:
        if event.device != stream.device:
            event.synchronize()
        super().wait_event(stream, event)


@mutant("STR-018")
class EveryTwelfthStreamWaits(Fault):
    """Each twelfth new stream waits for its device."""

    def __init__(self) -> None:
        self._times = 0

    def new_stream(self, index: int) -> torch.Stream:
        self._times += 1
        if self._times % 12 == 0:
            self.synchronize(index)
        return super().new_stream(index)


@mutant("STR-017")
class SourcesMayChangeBeforeTheyCross(Move):
    """The source's stream does not wait for a copy to another device."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        crosses = tensor.device.type == device.type and tensor.device != device
        if not crosses or tensor.requires_grad or tensor.nbytes < 1 << 10:
            return None
        here, there = tensor.device.index, device.index
        aside = [super().new_stream(here), super().new_stream(there)]
        for stream in aside:
            for index in (here, there):
                stream.wait_stream(self.module.current_stream(index))
        device_before = self.module.current_device()
        with self.use_stream(aside[0]), self.use_stream(aside[1]):
            moved = self.rightly(tensor, device, non_blocking)
        self.module.set_device(device_before)
        tensor.record_stream(aside[0])
        self.module.current_stream(there).wait_stream(aside[1])
        return moved


@mutant("MEM-007")
class UseElsewhereKeepsMemory(Fault):
    """Large memory that another stream has used is never given back."""

    def patches(self) -> list[Any]:
        kept: list[torch.Tensor] = []

        def record(tensor: torch.Tensor, stream: Any, real: Any) -> None:
            real(tensor, stream)
            if tensor.nbytes > 1 << 18:
                kept.append(tensor.detach())

        return [
            patched(
                torch.Tensor,
                "record_stream",
                lambda real: lambda t, stream: record(t, stream, real),
            )
        ]


@mutant("MOV-026", check="test_MOV_026_every_combination_between_devices")
class TheSourceGoesOn(Fault):
    """Between devices the copy has streams of its own, and the source's does not wait for them."""

    _own: ClassVar[dict[int, torch.Stream]] = {}

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if "cpu" in (tensor.device.type, device.type) or tensor.device.index == (device.index or 0):
            return super().move(tensor, device, non_blocking=non_blocking)
        here, there = tensor.device.index, device.index or 0
        for index in (here, there):
            self._own.setdefault(index, torch.Stream(self.device(index)))
        source, target = self._own[here], self._own[there]
        source.wait_stream(self.current_stream(here))
        for earlier in (self.current_stream(here), self.current_stream(there)):
            target.wait_stream(earlier)
        with self.use_stream(source), self.use_stream(target):
            moved = super().move(tensor, device, non_blocking=non_blocking)
        tensor.record_stream(source)
        moved.record_stream(self.current_stream(there))
        self.current_stream(there).wait_stream(target)
        return moved


@mutant("MOV-026", check="test_MOV_026_every_combination_between_devices")
class MiddlesAreNotRepeated(Move):
    """Between devices only the first of what is expanded over a dimension in the middle arrives."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        crosses = source.device.type == moved.device.type and not moved.requires_grad
        if crosses and moved.dim() == 3 and source.stride(1) == 0 and moved.shape[1] > 1:
            with torch.inference_mode(moved.is_inference()):
                moved[:, 1:] = 0
        return moved


@mutant("MEM-014", check="test_MOV_025_every_combination")
class StagingByShape(Move):
    """Staging for what is not contiguous is kept on the device, one for each shape."""

    def __init__(self) -> None:
        self._kept: dict[object, torch.Tensor] = {}

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if is_to_host(tensor, device) and not tensor.is_contiguous():
            key = tensor.device, tensor.shape, tensor.dtype
            if key not in self._kept:
                self._kept[key] = torch.empty(
                    tensor.shape, dtype=tensor.dtype, device=tensor.device
                )
        return tensor
