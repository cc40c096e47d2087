"""The kinds of collectives that the ranks try: how each is called, and what it must give."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_kind import (
    CARRIED,
    REDUCED,
    SUMMED,
    Kind,
    broadcast,
    gather,
    named,
    reduce,
    summed,
)
from anydevice_conformance.rank_kinds_unusual import UNUSUAL

__all__ = ["KINDS"]


def _gather_into(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    whole = torch.zeros(tensor.numel() * world, dtype=tensor.dtype, device=tensor.device)
    into = named("all_gather_single", "all_gather_into_tensor")
    return into(whole, tensor, async_op=waited), whole


def _scatter(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    whole = torch.cat([tensor + r for r in range(world)])
    part = torch.zeros_like(tensor)
    scatter = named("reduce_scatter_single", "reduce_scatter_tensor")
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
    pieces = [_moved_on(tensor, r) for r in range(world)] if rank == world - 1 else None
    part = torch.zeros_like(tensor)
    return dist.scatter(part, pieces, src=world - 1, async_op=waited), part


def _moved_on(tensor: torch.Tensor, places: int) -> torch.Tensor:
    """As `torch.roll`, which devices need not have."""
    start = tensor.numel() - places % max(1, tensor.numel())
    return torch.cat([tensor[start:], tensor[:start]])


def _exchange(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    """Each rank sends its tensor, moved on by the receiver's number, to each."""
    whole = torch.zeros(tensor.numel() * world, dtype=tensor.dtype, device=tensor.device)
    sent = torch.cat([_moved_on(tensor, r) for r in range(world)])
    return dist.all_to_all_single(whole, sent, async_op=waited), whole


def _alone(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    """In a group of one rank, of which each is in its own."""
    if "groups" not in _made:
        _made["groups"] = [dist.new_group([r]) for r in range(world)]
    return dist.all_reduce(tensor, group=_made["groups"][rank], async_op=waited), tensor


_made: dict[str, Any] = {}


#: Name to kind.
KINDS: Final = {
    "all_reduce": Kind("COL-002", SUMMED, reduce(dist.ReduceOp.SUM), summed, summed=True),
    "broadcast": Kind("COL-003", CARRIED, broadcast(0), lambda all_, rank: all_[0]),
    "all_gather": Kind("COL-004", CARRIED, gather, lambda all_, rank: torch.cat(all_)),
    "reduce_scatter": Kind(
        "COL-007",
        (torch.float32, torch.bfloat16),
        _scatter,
        lambda all_, rank: summed([one + rank for one in all_], rank),
        summed=True,
    ),
    "all_gather_into_tensor": Kind(
        "COL-008", CARRIED, _gather_into, lambda all_, rank: torch.cat(all_)
    ),
    "send": Kind("COL-009", CARRIED, _send, lambda all_, rank: all_[0]),
    "all_reduce, maximum": Kind(
        "COL-012",
        REDUCED,
        reduce(dist.ReduceOp.MAX),
        lambda all_, rank: torch.stack(all_).amax(0),
        summed=True,
    ),
    "all_reduce, minimum": Kind(
        "COL-012",
        REDUCED,
        reduce(dist.ReduceOp.MIN),
        lambda all_, rank: torch.stack(all_).amin(0),
        summed=True,
    ),
    "all_reduce of other dtypes": Kind(
        "COL-012",
        (torch.float64, torch.float16, torch.int32),
        reduce(dist.ReduceOp.SUM),
        summed,
        summed=True,
    ),
    "broadcast from the last": Kind("COL-012", CARRIED, broadcast(-1), lambda all_, rank: all_[-1]),
    "all_reduce, product": Kind(
        "COL-012",
        (torch.float32, torch.int64, torch.int32),
        reduce(dist.ReduceOp.PRODUCT),
        lambda all_, rank: torch.stack(all_).prod(0, dtype=all_[0].dtype),
        summed=True,
        needed=False,
    ),
    "all_reduce in a group of one": Kind(
        "COL-012", SUMMED, _alone, lambda all_, rank: all_[rank], summed=True
    ),
    "reduce_scatter of int64": Kind(
        "COL-012",
        (torch.int64,),
        _scatter,
        lambda all_, rank: summed([one + rank for one in all_], rank),
        summed=True,
        needed=False,
    ),
    "reduce to the last": Kind(
        "COL-012",
        SUMMED,
        _reduce_to_last,
        lambda all_, rank: summed(all_, rank) if rank == len(all_) - 1 else all_[rank],
        summed=True,
        needed=False,
    ),
    "gather at the last": Kind(
        "COL-012",
        CARRIED,
        _gather_at_last,
        lambda all_, rank: torch.cat(all_) if rank == len(all_) - 1 else all_[rank],
        needed=False,
    ),
    "scatter from the last": Kind(
        "COL-012",
        CARRIED,
        _scatter_from_last,
        lambda all_, rank: all_[-1].roll(rank),
        needed=False,
    ),
    "all_to_all_single": Kind(
        "COL-012",
        CARRIED,
        _exchange,
        lambda all_, rank: torch.cat([one.roll(rank) for one in all_]),
        needed=False,
    ),
    **UNUSUAL,
}
