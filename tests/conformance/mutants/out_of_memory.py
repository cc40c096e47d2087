"""Faults when memory runs out."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

from anydevice.backend import MemoryInfo
from mutants.gallery import Fault, mutant, patched


class _Factories(Fault):
    """Changes what happens when torch makes a tensor on the device."""

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Make a tensor of the device."""
        return real(*args, **kwargs)

    def patches(self) -> list[Any]:
        def change(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def factory(*args: Any, **kwargs: Any) -> torch.Tensor:
                device = kwargs.get("device")
                if device is None or torch.device(device).type != self.device_type:
                    return real(*args, **kwargs)
                return self.make(real, *args, **kwargs)

            return factory

        return [patched(torch, name, change) for name in ("empty", "ones")]


@mutant("OOM-001")
class Overcommits(Fault):
    """More is given than the device says it has."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.free // 4, total=info.total // 4)


@mutant("OOM-001")
class ReturnsLess(_Factories):
    """Too large a tensor comes back smaller, without an error."""

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return real(*args, **kwargs)
        except torch.OutOfMemoryError:
            return real(1, **kwargs)


@mutant("OOM-002")
class NeverRecognised(Fault):
    """`is_out_of_memory` is always False."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return False


@mutant("OOM-002")
class OtherWords(_Factories):
    """The device raises a bare RuntimeError with words of its own."""

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return real(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise RuntimeError("rtMalloc failed: EE1001 resource exhausted") from error


@mutant("OOM-002")
class SomebodyElsesWords(Fault):
    """`is_out_of_memory` looks for another vendor's words."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "FOO out of memory" in str(error)


@mutant("OOM-003")
class AlwaysRecognised(Fault):
    """Every error is out of memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return True


@mutant("OOM-003")
class AnyRuntimeError(Fault):
    """Every RuntimeError is out of memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, RuntimeError)


@mutant("OOM-003")
class TheWordMemory(Fault):
    """Every error that says "memory" is out of memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "memory" in str(error).lower()


@mutant("OOM-003")
class TheHostsToo(Fault):
    """A host without memory is a device without memory."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        host = isinstance(error, MemoryError) or "can't allocate memory" in str(error)
        return host or super().is_out_of_memory(error)


@mutant("OOM-004")
class BrokenAfterwards(_Factories):
    """After the error the device computes with zeros."""

    broken = False

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return real(*args, **kwargs)
        except torch.OutOfMemoryError:
            self.broken = True
            raise

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        return torch.zeros_like(moved) if self.broken and device.type != "cpu" else moved


@mutant("OOM-004")
class LosesMemory(_Factories):
    """After the error most of the memory stays taken."""

    def __init__(self) -> None:
        self.lost: list[torch.Tensor] = []

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return real(*args, **kwargs)
        except torch.OutOfMemoryError:
            index = torch.device(kwargs["device"]).index
            free = super().memory_info(index).free
            self.lost.append(real(int(free * 0.7), **kwargs))
            raise


@mutant("OOM-005")
class OvercommitsInSteps(Fault):
    """Large requests are refused, but small ones are given beyond what the device says it has."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=info.free // 2, total=info.total * 5 // 8)


@mutant("OOM-005")
class RoomNeverComesBack(_Factories):
    """Once the device was full, half of it stays taken."""

    def __init__(self) -> None:
        self.lost: list[torch.Tensor] = []

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        made = real(*args, **kwargs)
        if len(self.lost) < 8:
            self.lost.append(made)
        return made


@mutant("OOM-005")
class OtherWordsWhenFull(_Factories):
    """Only huge requests raise the right error; a full device raises another."""

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return real(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            total = super().memory_info(torch.device(kwargs["device"]).index).total
            if isinstance(args[0], int) and args[0] > total:
                raise
            raise RuntimeError("allocator: no block") from error


@mutant("OOM-006")
class MoveWrapsTheError(Fault):
    """`move` wraps the error beyond recognition."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        try:
            return super().move(tensor, device, non_blocking=non_blocking)
        except RuntimeError as error:
            raise ValueError(f"could not move a tensor of shape {tuple(tensor.shape)}") from error


@mutant("OOM-006")
class MoveGivesUpSilently(Fault):
    """`move` returns the source when the device is full."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        try:
            return super().move(tensor, device, non_blocking=non_blocking)
        except torch.OutOfMemoryError:
            return tensor


@mutant("OOM-007")
class ReadsTheArguments(Fault):
    """`is_out_of_memory` reads ``error.args[0]``, which some errors do not have."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return "out of memory" in error.args[0]


@mutant("OOM-007")
class ReturnsAMatch(Fault):
    """`is_out_of_memory` returns a match object or None."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return re.search("out of memory", str(error))  # type: ignore[return-value]


@mutant("OOM-008")
class OneLimitForAll(_Factories):
    """The devices share one limit."""

    def make(self, real: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> torch.Tensor:
        index = torch.device(kwargs["device"]).index or 0
        others = [i for i in range(self.device_count()) if i != index]
        if any(super(Fault, self).memory_allocated(i) > 32 << 20 for i in others):
            raise torch.OutOfMemoryError("out of memory")
        return real(*args, **kwargs)
