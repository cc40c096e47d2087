"""Less usual kinds of collectives: of nothing, of transposed tensors, in a ring, a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_kind import (
    CARRIED,
    SUMMED,
    Kind,
    broadcast,
    gather,
    named,
    reduce,
    summed,
)

__all__ = ["UNUSUAL"]


def _ring(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    """Each rank sends to the next one, and receives from the one before, in one batch.

    Odd ranks receive first: a device that does its work at once waits in each of them.
    """
    came = torch.zeros_like(tensor)
    both = [
        dist.P2POp(dist.isend, tensor, (rank + 1) % world),
        dist.P2POp(dist.irecv, came, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(both[::-1] if rank % 2 else both):
        work.wait()
    return None, came


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    """A view of an even number of the elements that is dense, and not contiguous."""
    return tensor[: tensor.numel() // 2 * 2].view(2, -1).t()


def _reduce_transposed(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    return dist.all_reduce(_transposed(tensor), async_op=waited), tensor


def _broadcast_transposed(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    return dist.broadcast(_transposed(tensor), src=0, async_op=waited), tensor


def _gather_transposed(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    mine = _transposed(tensor)
    pieces = [torch.zeros_like(mine) for _ in range(world)]
    work = dist.all_gather(pieces, mine, async_op=waited)
    if work is not None:
        work.wait()
    return None, torch.cat(pieces).reshape(-1)


def _gather_transposed_into(tensor: torch.Tensor, rank: int, world: int, waited: bool) -> Any:
    mine = _transposed(tensor)
    whole = torch.zeros(mine.shape[0] * world, 2, dtype=tensor.dtype, device=tensor.device)
    into = named("all_gather_single", "all_gather_into_tensor")
    return into(whole, mine, async_op=waited), whole.view(-1)


def _even_part(change: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """What a collective of all but an odd last element gives."""

    def expected(all_: list[torch.Tensor], rank: int) -> torch.Tensor:
        even = all_[rank].numel() // 2 * 2
        return torch.cat([change(all_)[:even], all_[rank][even:]])

    return expected


def _pieces_transposed(all_: list[torch.Tensor], rank: int) -> torch.Tensor:
    return torch.cat([_transposed(one) for one in all_]).reshape(-1)


#: Name to kind.
UNUSUAL: Final = {
    "exchange in a ring": Kind(
        "COL-012", CARRIED, _ring, lambda all_, rank: all_[rank - 1], needed=False
    ),
    "all_reduce, mean": Kind(
        "COL-012",
        (torch.float32, torch.float64),
        reduce(dist.ReduceOp.AVG),
        lambda all_, rank: summed(all_, rank) / len(all_),
        summed=True,
        needed=False,
    ),
    "all_reduce of nothing": Kind(
        "COL-012", SUMMED, reduce(dist.ReduceOp.SUM), summed, counts=(0,)
    ),
    "broadcast of nothing": Kind(
        "COL-012", CARRIED, broadcast(0), lambda all_, rank: all_[0], counts=(0,)
    ),
    "all_gather of nothing": Kind(
        "COL-012", CARRIED, gather, lambda all_, rank: torch.cat(all_), counts=(0,)
    ),
    "all_reduce of a transposed tensor": Kind(
        "COL-012",
        SUMMED,
        _reduce_transposed,
        _even_part(lambda all_: summed(all_, 0)),
        summed=True,
        needed=False,
    ),
    "broadcast of a transposed tensor": Kind(
        "COL-012",
        CARRIED,
        _broadcast_transposed,
        _even_part(lambda all_: all_[0]),
        needed=False,
    ),
    "all_gather of a transposed tensor": Kind(
        "COL-012", CARRIED, _gather_transposed, _pieces_transposed, needed=False
    ),
    "all_gather_into_tensor of a transposed tensor": Kind(
        "COL-012", CARRIED, _gather_transposed_into, _pieces_transposed, needed=False
    ),
}
