"""The forms of collectives that combine values: each with what it must give to each rank."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_form import Form, Place, Tensors, joined, works
from anydevice_conformance.rank_kind import SUMMED
from anydevice_conformance.rank_operations import OPERATIONS

__all__ = ["SUMS"]

_NOTHING: Final[Any] = None
_ALL: Final = tuple(OPERATIONS)


def _all_reduce(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    operation = place.operation.named
    return works(dist.all_reduce(mine[0], op=operation, **place.group)), mine


def _firsts(place: Place, all_: list[Tensors]) -> torch.Tensor:
    return place.operation.reduced(torch.stack([one[0] for one in all_]))


def _own_part(place: Place, all_: list[Tensors]) -> Tensors:
    return [place.operation.reduced(torch.stack([one[place.members.rank] for one in all_]))]


def _part(name: str, flat: bool, within: bool = False) -> Form:
    """Reduce-scatter of one tensor: the ranks' parts one after another, or stacked.

    Args:
        name: of the function.
        flat: whether the parts are one after another.
        within: whether the result is put into this rank's part of that tensor.
    """

    def call(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
        both = joined(mine, flat)
        if within:
            whole = place.room(both, "plain")
            whole.copy_(both)
            part = whole.view(place.members.size, *mine[0].shape)[place.members.rank]
        else:
            whole, part = place.give(both), place.room(mine[0])
        work = getattr(dist, name)(part, whole, op=place.operation.named, **place.group)
        return works(work), [part]

    def wrong(place: Place, tensor: torch.Tensor) -> None:
        getattr(dist, name)(None, tensor, **place.group)

    return Form(
        call,
        _own_part,
        tensors=lambda size: size,
        operations=_ALL,
        needed=not within,
        empty=True,
        hosts=flat,
        laid=not within,
        laid_out=not within,
        wrong=wrong,
    )


def _of_list(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    part = place.room(mine[0])
    work = dist.reduce_scatter(part, mine, op=place.operation.named, **place.group)
    return works(work), [part]


def _reduce(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    operation = place.operation.named
    work = dist.reduce(mine[0], op=operation, **place.rooted("dst"), **place.group)
    return works(work), mine


_PARTS: Final = {
    f"{name}, {word}": _part(name, word != "stacked", word == "in place")
    for name in ("reduce_scatter_tensor", "reduce_scatter_single")
    if hasattr(dist, name)
    for word in ("joined", "stacked", "in place")
}
#: Name to form.
SUMS: Final[dict[str, Form]] = {
    "all_reduce": Form(
        _all_reduce,
        lambda place, all_: [_firsts(place, all_)],
        operations=_ALL,
        dtypes=SUMMED,
        needed=True,
        future=True,
        any_shape=True,
        hosts_laid=True,
        laid=True,
        wrong=lambda place, tensor: dist.all_reduce(_NOTHING, **place.group),
    ),
    **_PARTS,
    "reduce_scatter": Form(
        _of_list,
        _own_part,
        tensors=lambda size: size,
        operations=_ALL,
        empty=True,
        laid=True,
        laid_out=True,
    ),
    "reduce": Form(
        _reduce,
        lambda place, all_: [_firsts(place, all_)] if place.is_root else None,
        operations=_ALL,
        any_shape=True,
        laid=True,
    ),
}
