"""Faults of a full device, of what members tell, and of what they leave behind."""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anydevice.backend import MemoryInfo
from mutants.gallery import Fault, mutant
from mutants.kernels import Kernel
from mutants.moving import Move, is_from_host, is_to_host

_PRODUCTS = ("mm", "addmm", "bmm")


@mutant("MEM-015")
class ProductsLackInOtherWords(Kernel):
    """A product that finds no room for its result raises the driver's plain error."""

    operations = _PRODUCTS

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return real(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("launch failed: no resources") from error


@mutant("OOM-008")
class WorkspacesOnDeviceZero(Kernel):
    """Products on every device take a workspace of device 0."""

    operations = _PRODUCTS

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[-1].device.index:
            torch.empty(1 << 20, dtype=torch.uint8, device=f"{self.device_type}:0")
        return real(*args, **kwargs)


@mutant("MEM-015")
class EventsTakeMemory(Fault):
    """Each event takes a time stamp of the device for a moment."""

    def record_event(self, stream: Any) -> Any:
        torch.empty(512, dtype=torch.uint8, device=stream.device)
        return super().record_event(stream)


@mutant("DEV-010")
class NothingToSay(Fault):
    """`why_unavailable` gives None where there are devices."""

    def why_unavailable(self) -> str:
        return None if self.device_count() else ""  # type: ignore[return-value]


@mutant("DEV-013")
class WritesAFile(Fault):
    """`driver_version` writes what the driver said, and leaves it behind."""

    def driver_version(self) -> str:
        Path(tempfile.gettempdir(), "driver.json").write_text("{}")
        return super().driver_version()


@mutant("MOV-025")
class PinnedSourcesUntilWaited(Fault):
    """Page-locked sources of non-blocking uploads are let go of by `synchronize` only."""

    def __init__(self) -> None:
        self._kept = collections.defaultdict[int, list[torch.Tensor]](list)

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if is_from_host(tensor, device) and non_blocking and tensor.is_pinned():
            self._kept[device.index or 0].append(tensor.detach())
        return super().move(tensor, device, non_blocking=non_blocking)

    def synchronize(self, index: int) -> None:
        super().synchronize(index)
        self._kept[index].clear()


@mutant("MOV-025")
class SignsStayOnTheDevice(Move):
    """A pending sign is lost on the way to the host."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        lost = is_to_host(tensor, device) and tensor.is_neg()
        return torch._neg_view(tensor) if lost else tensor


@mutant("MOV-018")
class BareIsCurrent(Fault):
    """A device without an index is the current one."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if is_from_host(tensor, device) and device.index is None:
            device = torch.device(device.type, self.module.current_device())
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MEM-015")
class MeasuringTakesMemory(Fault):
    """To measure a device a little of its memory is needed: on a full one it raises."""

    def memory_info(self, index: int) -> MemoryInfo:
        found = super().memory_info(index)
        if found.free < 512:
            raise RuntimeError("out of resources")
        return found


@mutant("MEM-015")
class SideStreamsFindNoRoom(Fault):
    """What is cached for the default stream is not given back for a move on another one."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        index, size = device.index or 0, tensor.numel() * tensor.itemsize
        if tensor.device.type == "cpu" and device.type != "cpu":
            aside = self.module.current_stream(index).stream_id != 0
            if aside and size > self.module.mem_get_info(index)[0]:
                raise torch.OutOfMemoryError(f"no room for {size} bytes")
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("OOM-006")
class KeepsWhatHadNoRoom(Fault):
    """What could not be moved between devices is kept for a second try."""

    def __init__(self) -> None:
        self._again: dict[object, torch.Tensor] = {}

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        try:
            return super().move(tensor, device, non_blocking=non_blocking)
        except torch.OutOfMemoryError:
            if tensor.device.type != "cpu":
                self._again[device] = tensor.detach()
            raise
