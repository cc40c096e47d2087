"""What a kind of collective is, and what several kinds share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = [
    "CARRIED",
    "REDUCED",
    "SUMMED",
    "Kind",
    "broadcast",
    "gather",
    "named",
    "reduce",
    "summed",
]

SUMMED: Final = (torch.float32, torch.bfloat16, torch.int64)
REDUCED: Final = (*SUMMED, torch.float64, torch.float16, torch.int32)
CARRIED: Final = (*REDUCED, torch.uint8, torch.int8, torch.bool)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of collective.

    Attributes:
        paragraph: the id of what it follows.
        dtypes: that it must take.
        call: does it; returns what ``async_op`` gives, and the result.
        expected: the result of a rank, of what all ranks had.
        summed: whether values are computed with, and not only carried.
        needed: whether a device must have it; else one that says that it does not is let off.
        counts: how many elements a rank has; None for any number.
    """

    paragraph: str
    dtypes: tuple[torch.dtype, ...]
    call: Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    summed: bool = False
    needed: bool = True
    counts: tuple[int, ...] | None = None


def named(*names: str) -> Any:
    """The first function that torch.distributed has: newer versions have newer names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def reduce(operation: Any) -> Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]:
    """How `all_reduce` is called with an operation."""

    def call(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
        return dist.all_reduce(tensor, op=operation, async_op=waited), tensor

    return call


def broadcast(source: int) -> Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]:
    """How `broadcast` is called with a source."""

    def call(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
        return dist.broadcast(tensor, src=source % world, async_op=waited), tensor

    return call


def gather(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    """Call `all_gather`, whose pieces are put one after another."""
    pieces = [torch.zeros_like(tensor) for _ in range(world)]
    work = dist.all_gather(pieces, tensor, async_op=waited)
    if work is not None:
        work.wait()
    return None, torch.cat(pieces)


def summed(all_: list[torch.Tensor], rank: int) -> torch.Tensor:
    """The sum of what all ranks have."""
    return torch.stack(all_).sum(0, dtype=all_[0].dtype)
