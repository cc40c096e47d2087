"""Faults that show in whole jobs: rare, or only together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mutants.dtypes import _Operation
from mutants.gallery import Fault, mutant
from mutants.moving import Elsewhere, Move


@mutant("INF-001")
class EverySecondCrossing(Elsewhere):
    """Every second copy between devices is not ordered after the source's work."""

    count = 0

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        if tensor.device.type != device.type or tensor.device == device:
            return False
        self.count += 1
        return self.count % 2 == 0


@mutant("INF-001")
class LastRowIsLost(Move):
    """Activations that cross lose what a device's kernels would need: the last row."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.device.type == moved.device.type and moved.dim() == 3:
            moved = moved.clone()
            moved[:, -1] = 0
        return moved


@mutant("INF-002")
class RecordsElsewhere(Fault):
    """Of three events the last one is recorded on another stream than the one given."""

    count = 0

    def record_event(self, stream: Any) -> Any:
        self.count += 1
        index = stream.device.index or 0
        return super().record_event(stream if self.count % 3 else self.new_stream(index))


@mutant("INF-003")
class OneStagingForAll(Fault):
    """All pinned memory is one buffer, handed out again and again."""

    buffer: torch.Tensor | None = None

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.buffer is None:
            self.buffer = super().pin_memory(torch.zeros(1 << 20, dtype=torch.uint8))
        mine = self.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        return mine.copy_(tensor)


@mutant("INF-004")
class EveryThirdWait(Fault):
    """Every third `wait_event` does not wait."""

    count = 0

    def wait_event(self, stream: Any, event: Any) -> None:
        self.count += 1
        if self.count % 3:
            super().wait_event(stream, event)


@mutant("INF-005")
class EverySecondWait(Fault):
    """Every second `wait_event` does not wait."""

    count = 0

    def wait_event(self, stream: Any, event: Any) -> None:
        self.count += 1
        if self.count % 2:
            super().wait_event(stream, event)


@mutant("INF-005")
class InputsStayZero(Move):
    """Inputs that were moved to the device are zeros there."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        ids = moved.device.type != "cpu" and moved.dtype is torch.int64
        return torch.zeros_like(moved) if ids else moved


@mutant("INF-006")
class SmallDtypesAreScaled(_Operation):
    """A cast from float8 forgets the exponent's bias."""

    owner, name = torch.Tensor, "to"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        small = args[0].is_floating_point() and args[0].dtype.itemsize == 1
        return result * 2 if small and result.dtype is not args[0].dtype else result


@mutant("INF-007")
class BatchesAreWrong(_Operation):
    """`linear` without bias is off by a hundredth."""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        plain = len(args) < 3 or args[2] is None
        return result * 1.01 if plain else result


@mutant("INF-008")
class AddmmIsOff(_Operation):
    """`addmm` is off by a hundredth."""

    owner, name = torch, "addmm"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs) * 1.01


@mutant("INF-009")
class EmbeddingIsOff(_Operation):
    """`embedding` gives the next row."""

    name = "embedding"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real((args[0] + 1) % args[1].shape[0], *args[1:], **kwargs)


@mutant("INF-010")
class OneStagingForThreads(Move):
    """Two threads that move at the same time get the later one's tensor."""

    def __init__(self) -> None:
        self.staged: torch.Tensor | None = None
        self.main = threading.get_ident()

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == "cpu" or tensor.dtype is not torch.int64:
            return tensor
        self.staged = tensor
        time.sleep(0.002)
        return self.staged


@mutant("INF-011")
class ForgetsItsOwnError(Fault):
    """The device's own error is not recognised."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)


@mutant("INF-011")
class BrokenAfterRecognition(Move):
    """After an out-of-memory error weights arrive as zeros."""

    broken = False

    def is_out_of_memory(self, error: BaseException) -> bool:
        found = super().is_out_of_memory(error)
        self.broken = self.broken or found
        return found

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved * 0 if self.broken and moved.device.type != "cpu" else moved


@mutant("INF-012")
class KeepsWeights(Move):
    """Weights that were moved to the device are kept there."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if moved.device.type != "cpu" and moved.nbytes > 4096:
            self.kept.append(moved)
        return moved


@mutant("INF-013")
class ActivationsAreCut(Move):
    """Activations that travel lose their graph."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach() if moved.dim() == 3 else moved


@mutant("INF-013")
class GradientsAreDoubled(Move):
    """A gradient that travels is doubled."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if not moved.requires_grad or isinstance(moved, nn.Parameter) or moved.dim() != 3:
            return moved
        return moved * 2 - moved.detach()


@mutant("INF-014")
class HalfIsWrong(_Operation):
    """`linear` in 16 bits is off by a quarter."""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result * 1.25 if result.dtype.itemsize == 2 else result
