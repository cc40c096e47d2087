"""Faults of memory's numbers."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import psutil
import torch

from anydevice.backend import Capabilities, MemoryInfo
from mutants.gallery import Fault, mutant, patched
from mutants.moving import MaybeMoved, Move


@mutant("MEM-001")
class InfoIsATuple(Fault):
    """`memory_info` returns the driver's tuple."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return (info.free, info.total)  # type: ignore[return-value]


@mutant("MEM-001")
class InfoIsSwapped(Fault):
    """Free and total are in each other's place."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.total, total=info.free)


@mutant("MEM-001")
class InfoIsFloat(Fault):
    """Free is a float."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.free * 1.0, total=info.total)  # type: ignore[arg-type]


@mutant("MEM-001")
class FreeIsNegative(Fault):
    """Free is what is left of a budget that was exceeded."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.free - info.total - 1, total=info.total)


@mutant("MEM-002")
class FreeIsTotal(Fault):
    """Free is really the total."""

    def memory_info(self, index: int) -> MemoryInfo:
        total = super().memory_info(index).total
        return MemoryInfo(free=total, total=total)


@mutant("MEM-002")
class FreeIsAllocated(Fault):
    """Free is really what is allocated."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=self.memory_allocated(index), total=info.total)


@mutant("MEM-002")
class FreeIsInKiB(Fault):
    """Both numbers are KiB."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.free // 1024, total=info.total // 1024)


@mutant("MEM-002")
class FreeIsRemembered(Fault):
    """Free is measured once."""

    def __init__(self) -> None:
        self.known: dict[int, MemoryInfo] = {}

    def memory_info(self, index: int) -> MemoryInfo:
        return self.known.setdefault(index, super().memory_info(index))


@mutant("MEM-002")
class FreeIsTooCoarse(Fault):
    """Free falls by half of what was taken: two dies, of which one is asked."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=(info.free + info.total) // 2, total=info.total)


@mutant("MEM-003")
class CacheIsNotFree(Fault):
    """Free is the driver's alone: what this process has cached counts as used."""

    def _anydevice_cached_bytes(self, index: int) -> int:
        return 0


@mutant("MEM-003")
class FreeOnlyFalls(Fault):
    """Free is the least there ever was."""

    def __init__(self) -> None:
        self.least: dict[int, int] = {}

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        self.least[index] = min(info.free, self.least.get(index, info.free))
        return MemoryInfo(free=self.least[index], total=info.total)


@mutant("MEM-004")
class CacheCountedTwice(Fault):
    """What was cached before `empty_cache` is still added to free afterwards."""

    def __init__(self) -> None:
        self.remembered: dict[int, int] = {}

    def empty_cache(self, index: int) -> None:
        self.remembered[index] = max(
            self._anydevice_cached_bytes(index), self.remembered.get(index, 0)
        )
        super().empty_cache(index)

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        free = info.free + self.remembered.get(index, 0)
        return MemoryInfo(free=min(free, info.total), total=info.total)


@mutant("MEM-004")
class StaleAfterEmptyCache(Fault):
    """After `empty_cache` free is what it was before, until the next call to it."""

    def __init__(self) -> None:
        self.known: dict[int, MemoryInfo] = {}

    def empty_cache(self, index: int) -> None:
        super().empty_cache(index)
        self.known[index] = super().memory_info(index)

    def memory_info(self, index: int) -> MemoryInfo:
        return self.known.get(index) or super().memory_info(index)


@mutant("MEM-004")
class CacheLostByEmptyCache(Fault):
    """Memory given back by `empty_cache` counts as used: it is subtracted once more."""

    def __init__(self) -> None:
        self.given: dict[int, int] = {}

    def empty_cache(self, index: int) -> None:
        self.given[index] = self.given.get(index, 0) + self._anydevice_cached_bytes(index)
        super().empty_cache(index)

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=max(0, info.free - self.given.get(index, 0)), total=info.total)


@mutant("MEM-005")
class EmptyCacheDoesNothing(Fault):
    """`empty_cache` keeps the cache."""

    def empty_cache(self, index: int) -> None:
        """Do nothing."""


@mutant("MEM-005")
class EmptyCacheOfTheFirst(Fault):
    """`empty_cache` knows device 0 only."""

    def empty_cache(self, index: int) -> None:
        if index == 0:
            super().empty_cache(index)


@mutant("MEM-006")
class AllocatedIsReserved(Fault):
    """`memory_allocated` is what the allocator has reserved."""

    def memory_allocated(self, index: int) -> int:
        return int(self.module.memory_reserved(index))


@mutant("MEM-006")
class AllocatedIsNothing(Fault):
    """`memory_allocated` is always 0."""

    def memory_allocated(self, index: int) -> int:
        return 0


@mutant("MEM-006")
class AllocatedIsPeak(Fault):
    """`memory_allocated` is the most there was."""

    def memory_allocated(self, index: int) -> int:
        return int(self.module.max_memory_allocated(index))


@mutant("MEM-006")
class AllocatedInPages(Fault):
    """`memory_allocated` counts pages."""

    def memory_allocated(self, index: int) -> int:
        return super().memory_allocated(index) // 4096


@mutant("MEM-007")
class MemoryOfTheFirst(Fault):
    """`memory_info` ignores its index."""

    def memory_info(self, index: int) -> MemoryInfo:
        return super().memory_info(0)


@mutant("MEM-007")
class AllocatedOfAll(Fault):
    """`memory_allocated` is the sum over all devices."""

    def memory_allocated(self, index: int) -> int:
        return sum(
            super(AllocatedOfAll, self).memory_allocated(i) for i in range(self.device_count())
        )


@mutant("MEM-007")
class IndicesAreSwapped(Fault):
    """Each device answers for the other."""

    def memory_info(self, index: int) -> MemoryInfo:
        return super().memory_info(self.device_count() - 1 - index)


@mutant("MEM-008", base="cpu")
class OwnUseOnly(Fault):
    """Free is the total less what this process uses."""

    def memory_info(self, index: int) -> MemoryInfo:
        total = 1 << 30  # of a small machine: the other process fills half of it, several times
        return MemoryInfo(free=total - psutil.Process().memory_info().rss, total=total)


@mutant("MEM-009")
class FreeIsPromised(Fault):
    """A third of the total is promised beyond what is free."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=min(info.total, info.free + info.total // 3), total=info.total)


@mutant("MEM-010")
class TotalIsFree(Fault):
    """Total is what is free now."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.free, total=info.free)


@mutant("MEM-010")
class TotalWithoutAllocated(Fault):
    """Total leaves out what tensors of this process use."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return dataclasses.replace(info, total=info.total - self.memory_allocated(index))


@mutant("MEM-011")
class PeakIsNow(Fault):
    """The peak is what is allocated now."""

    def peak_memory_allocated(self, index: int) -> int:
        return self.memory_allocated(index)


@mutant("MEM-011")
class PeakIsNeverReset(Fault):
    """`reset_peak_memory` does nothing."""

    def reset_peak_memory(self, index: int) -> None:
        """Do nothing."""


@mutant("MEM-011")
class PeakOfTheFirst(Fault):
    """The peak ignores its index."""

    def peak_memory_allocated(self, index: int) -> int:
        return super().peak_memory_allocated(0)


@mutant("MEM-012")
class UnifiedButSeparate(Fault):
    """Unified memory is claimed, and the host loses nothing to the device."""

    capabilities = Capabilities(
        caching_allocator=True,
        streams=True,
        pinned_memory=True,
        device_rng=True,
        unified_memory=True,
    )

    def patches(self) -> list[Any]:
        fixed = psutil.virtual_memory()
        return [mock.patch.object(psutil, "virtual_memory", return_value=fixed)]


@mutant("MEM-013")
class ClaimsACache(Fault):
    """A cache is claimed, and freed memory goes back at once."""

    def patches(self) -> list[Any]:
        module = torch.get_device_module(self.device_type)
        return [patched(module, "memory_reserved", lambda real: module.memory_allocated)]


@mutant("MEM-014")
class MoveKeepsResults(Move):
    """`move` keeps what it moved, "until the copy is done"."""

    def __init__(self) -> None:
        self.in_flight: list[torch.Tensor] = []

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if moved.device.type == self.device_type:
            self.in_flight.append(moved)
        return moved


@mutant("MEM-014")
class MoveBackKeepsSources(Move):
    """A non-blocking `move` to the host keeps its source alive for good."""

    def __init__(self) -> None:
        self.in_flight: list[torch.Tensor] = []

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if non_blocking and device.type == "cpu":
            self.in_flight.append(tensor)
        return None
