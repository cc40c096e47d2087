"""The kinds of collectives that the ranks try: how each is called, and what it must give."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

__all__ = ["KINDS", "Kind"]

_SUMMED: Final = (torch.float32, torch.bfloat16, torch.int64)
_REDUCED: Final = (*_SUMMED, torch.float64, torch.float16, torch.int32)
_CARRIED: Final = (*_REDUCED, torch.uint8, torch.int8, torch.bool)


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
    """

    paragraph: str
    dtypes: tuple[torch.dtype, ...]
    call: Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]
    expected: Callable[[list[torch.Tensor], int], torch.Tensor]
    summed: bool = False
    needed: bool = True


def _named(*names: str) -> Any:
    """The first function that torch.distributed has: newer versions have newer names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


def _reduce(operation: Any) -> Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]:
    def call(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
        return dist.all_reduce(tensor, op=operation, async_op=waited), tensor

    return call


def _broadcast(source: int) -> Callable[[torch.Tensor, int, int, bool], tuple[Any, torch.Tensor]]:
    def call(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
        return dist.broadcast(tensor, src=source % world, async_op=waited), tensor

    return call


def _gather(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    pieces = [torch.zeros_like(tensor) for _ in range(world)]
    work = dist.all_gather(pieces, tensor, async_op=waited)
    if work is not None:
        work.wait()
    return None, torch.cat(pieces)


def _gather_into(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    whole = torch.zeros(tensor.numel() * world, dtype=tensor.dtype, device=tensor.device)
    gather = _named("all_gather_single", "all_gather_into_tensor")
    return gather(whole, tensor, async_op=waited), whole


def _scatter(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    whole = torch.cat([tensor + r for r in range(world)])
    part = torch.zeros_like(tensor)
    scatter = _named("reduce_scatter_single", "reduce_scatter_tensor")
    return scatter(part, whole, async_op=waited), part


def _send(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    if rank == 0:
        dist.send(tensor, dst=world - 1)
    elif rank == world - 1:
        dist.recv(tensor, src=0)
    return None, tensor


def _reduce_to_last(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    kept = tensor.clone()
    work = dist.reduce(tensor, dst=world - 1, async_op=waited)
    if work is not None:
        work.wait()
    return None, tensor if rank == world - 1 else kept  # what others have then is not said


def _gather_at_last(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    pieces = [torch.zeros_like(tensor) for _ in range(world)] if rank == world - 1 else None
    work = dist.gather(tensor, pieces, dst=world - 1, async_op=waited)
    if work is not None:
        work.wait()
    return None, torch.cat(pieces) if pieces is not None else tensor


def _scatter_from_last(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    pieces = [tensor.roll(r) for r in range(world)] if rank == world - 1 else None
    part = torch.zeros_like(tensor)
    return dist.scatter(part, pieces, src=world - 1, async_op=waited), part


def _exchange(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    """Each rank sends its tensor, moved on by the receiver's number, to each."""
    whole = torch.zeros(tensor.numel() * world, dtype=tensor.dtype, device=tensor.device)
    sent = torch.cat([tensor.roll(r) for r in range(world)])
    return dist.all_to_all_single(whole, sent, async_op=waited), whole


def _alone(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    """In a group of one rank, of which each is in its own."""
    if "groups" not in _made:
        _made["groups"] = [dist.new_group([r]) for r in range(world)]
    return dist.all_reduce(tensor, group=_made["groups"][rank], async_op=waited), tensor


_made: dict[str, Any] = {}


def _summed(all_: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.stack(all_).sum(0, dtype=all_[0].dtype)


#: Name to kind.
KINDS: Final = {
    "all_reduce": Kind("COL-002", _SUMMED, _reduce(dist.ReduceOp.SUM), _summed, summed=True),
    "broadcast": Kind("COL-003", _CARRIED, _broadcast(0), lambda all_, rank: all_[0]),
    "all_gather": Kind("COL-004", _CARRIED, _gather, lambda all_, rank: torch.cat(all_)),
    "reduce_scatter": Kind(
        "COL-007",
        (torch.float32, torch.bfloat16),
        _scatter,
        lambda all_, rank: _summed([one + rank for one in all_], rank),
        summed=True,
    ),
    "all_gather_into_tensor": Kind(
        "COL-008", _CARRIED, _gather_into, lambda all_, rank: torch.cat(all_)
    ),
    "send": Kind("COL-009", _CARRIED, _send, lambda all_, rank: all_[0]),
    "all_reduce, maximum": Kind(
        "COL-012",
        _REDUCED,
        _reduce(dist.ReduceOp.MAX),
        lambda all_, rank: torch.stack(all_).amax(0),
        summed=True,
    ),
    "all_reduce, minimum": Kind(
        "COL-012",
        _REDUCED,
        _reduce(dist.ReduceOp.MIN),
        lambda all_, rank: torch.stack(all_).amin(0),
        summed=True,
    ),
    "all_reduce of other dtypes": Kind(
        "COL-012",
        (torch.float64, torch.float16, torch.int32),
        _reduce(dist.ReduceOp.SUM),
        _summed,
        summed=True,
    ),
    "broadcast from the last": Kind(
        "COL-012", _CARRIED, _broadcast(-1), lambda all_, rank: all_[-1]
    ),
    "all_reduce, product": Kind(
        "COL-012",
        (torch.float32, torch.int64, torch.int32),
        _reduce(dist.ReduceOp.PRODUCT),
        lambda all_, rank: torch.stack(all_).prod(0, dtype=all_[0].dtype),
        summed=True,
        needed=False,
    ),
    "all_reduce in a group of one": Kind(
        "COL-012", _SUMMED, _alone, lambda all_, rank: all_[rank], summed=True
    ),
    "reduce_scatter of int64": Kind(
        "COL-012",
        (torch.int64,),
        _scatter,
        lambda all_, rank: _summed([one + rank for one in all_], rank),
        summed=True,
        needed=False,
    ),
    "reduce to the last": Kind(
        "COL-012",
        _SUMMED,
        _reduce_to_last,
        lambda all_, rank: _summed(all_, rank) if rank == len(all_) - 1 else all_[rank],
        summed=True,
        needed=False,
    ),
    "gather at the last": Kind(
        "COL-012",
        _CARRIED,
        _gather_at_last,
        lambda all_, rank: torch.cat(all_) if rank == len(all_) - 1 else all_[rank],
        needed=False,
    ),
    "scatter from the last": Kind(
        "COL-012",
        _CARRIED,
        _scatter_from_last,
        lambda all_, rank: all_[-1].roll(rank),
        needed=False,
    ),
    "all_to_all_single": Kind(
        "COL-012",
        _CARRIED,
        _exchange,
        lambda all_, rank: torch.cat([one.roll(rank) for one in all_]),
        needed=False,
    ),
}
