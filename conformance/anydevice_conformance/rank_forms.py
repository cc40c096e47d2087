"""The forms of collectives that carry values: each with what it must give to each rank."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_form import Form, Place, Tensors, joined, works
from anydevice_conformance.rank_forms_sums import SUMS

__all__ = ["FORMS"]

_NOTHING: Final[Any] = None


def _broadcast(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    return works(dist.broadcast(mine[0], **place.rooted("src"), **place.group)), mine


def _pieces(place: Place, like: torch.Tensor) -> Tensors:
    return [place.room(like) for _ in place.members.ranks]


def _all_gather(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    pieces = _pieces(place, mine[0])
    return works(dist.all_gather(pieces, mine[0], **place.group)), pieces


def _all_gather_within(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """The pieces are views of one tensor, and this rank's own is what it gives."""
    pieces = list(place.room(torch.stack([mine[0]] * place.members.size)))
    own = pieces[place.members.rank]
    own.copy_(mine[0])
    return works(dist.all_gather(pieces, own, **place.group)), pieces


def _firsts(place: Place, all_: list[Tensors]) -> Tensors:
    return [one[0] for one in all_]


def _into(name: str, flat: bool, within: bool = False) -> Form:
    """All-gather into one tensor: the ranks' pieces one after another, or stacked.

    Args:
        name: of the function.
        flat: whether the pieces are one after another.
        within: whether this rank's part of that tensor is what it gives.
    """

    def call(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
        whole = place.room(joined([mine[0]] * place.members.size, flat))
        given = mine[0]
        if within:
            given = whole.view(place.members.size, *given.shape)[place.members.rank]
            given.copy_(mine[0])
        return works(getattr(dist, name)(whole, given, **place.group)), [whole]

    def wrong(place: Place, tensor: torch.Tensor) -> None:
        getattr(dist, name)(None, tensor, **place.group)

    return Form(
        call,
        lambda place, all_: [joined(_firsts(place, all_), flat)],
        needed=True,
        empty=True,
        hosts=flat,
        laid=not within,
        laid_out=not within,
        wrong=wrong,
    )


def _gather(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    pieces = _pieces(place, mine[0]) if place.is_root else None
    work = dist.gather(mine[0], pieces, **place.rooted("dst"), **place.group)
    return works(work), pieces or []


def _gather_within(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """What the root gives is one of the pieces."""
    pieces, given = _pieces(place, mine[0]) if place.is_root else None, mine[0]
    if pieces:
        given = pieces[place.root]
        given.copy_(mine[0])
    work = dist.gather(given, pieces, **place.rooted("dst"), **place.group)
    return works(work), pieces or []


def _scatter(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    part, given = place.room(mine[0]), mine if place.is_root else None
    return works(dist.scatter(part, given, **place.rooted("src"), **place.group)), [part]


def _scatter_within(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """What the root gets is one of the pieces."""
    part = mine[place.root] if place.is_root else place.room(mine[0])
    given = mine if place.is_root else None
    return works(dist.scatter(part, given, **place.rooted("src"), **place.group)), [part]


def _all_to_all(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    came = [place.room(one) for one in mine]
    return works(dist.all_to_all(came, mine, **place.group)), came


def _all_to_all_single(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    whole = place.give(torch.stack(mine))
    came = place.room(whole)
    return works(dist.all_to_all_single(came, whole, **place.group)), [came]


#: Rows that a rank sends to another at most, where they are not as many to each.
_ROWS: Final = 3


def _uneven(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    splits, rank = place.splits(_ROWS), place.members.rank
    sent, received = splits[rank], [row[rank] for row in splits]
    rows = torch.stack(mine)
    whole = place.give(rows[: sum(sent)])
    came = place.room(torch.stack([mine[0]] * (sum(received) + 1))[1:])
    return works(dist.all_to_all_single(came, whole, received, sent, **place.group)), [came]


def _uneven_gives(place: Place, all_: list[Tensors]) -> Tensors:
    splits, rank = place.splits(_ROWS), place.members.rank
    parts = [torch.stack(one)[:0] for one in all_[:1]]
    for row, one in zip(splits, all_, strict=True):
        start = sum(row[:rank])
        parts.append(torch.stack(one)[start : start + row[rank]])
    return [torch.cat(parts)]


def _uneven_lists(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    splits, rank = place.splits(_ROWS), place.members.rank
    rows, sent, start = torch.stack(mine), [], 0
    for count in splits[rank]:
        sent.append(place.give(rows[start : start + count]))
        start += count
    counts = [row[rank] for row in splits]
    came = [place.room(torch.stack([mine[0]] * (count + 1))[1:]) for count in counts]
    return works(dist.all_to_all(came, sent, **place.group)), came


def _uneven_lists_give(place: Place, all_: list[Tensors]) -> Tensors:
    rank = place.members.rank
    counts = [row[rank] for row in place.splits(_ROWS)]
    return list(torch.split(_uneven_gives(place, all_)[0], counts))


def _transposed(place: Place, all_: list[Tensors]) -> Tensors:
    return [one[place.members.rank] for one in all_]


def _no_dtype(place: Place, tensor: torch.Tensor) -> None:
    other = torch.float32 if tensor.dtype is not torch.float32 else torch.int64
    pieces = [tensor.to(other) for _ in place.members.ranks]
    dist.all_gather(pieces, tensor, **place.group)


_JOINS: Final = {
    f"{name}, {word}": _into(name, word != "stacked", word == "in place")
    for name in ("all_gather_into_tensor", "all_gather_single")
    if hasattr(dist, name)
    for word in ("joined", "stacked", "in place")
}
#: Name to form.
FORMS: Final[dict[str, Form]] = {
    **SUMS,
    "broadcast": Form(
        _broadcast,
        lambda place, all_: [all_[place.root][0]],
        needed=True,
        any_shape=True,
        hosts_laid=True,
        laid=True,
        wrong=lambda place, tensor: dist.broadcast(_NOTHING, src=0, **place.group),
    ),
    "all_gather": Form(
        _all_gather,
        _firsts,
        needed=True,
        any_shape=True,
        laid=True,
        laid_out=True,
        wrong=_no_dtype,
    ),
    "all_gather, in place": Form(_all_gather_within, _firsts, empty=True),
    **_JOINS,
    "gather": Form(
        _gather,
        lambda place, all_: _firsts(place, all_) if place.is_root else [],
        any_shape=True,
        laid=True,
    ),
    "gather, in place": Form(
        _gather_within, lambda place, all_: _firsts(place, all_) if place.is_root else []
    ),
    "scatter": Form(
        _scatter,
        lambda place, all_: [all_[place.root][place.members.rank]],
        tensors=lambda size: size,
        any_shape=True,
        laid_out=True,
    ),
    "scatter, in place": Form(
        _scatter_within,
        lambda place, all_: [all_[place.root][place.members.rank]],
        tensors=lambda size: size,
    ),
    "all_to_all": Form(
        _all_to_all,
        _transposed,
        tensors=lambda size: size,
        empty=True,
        laid=True,
        laid_out=True,
    ),
    "all_to_all_single": Form(
        _all_to_all_single,
        lambda place, all_: [torch.stack(_transposed(place, all_))],
        tensors=lambda size: size,
        empty=True,
        laid=True,
        laid_out=True,
    ),
    "all_to_all_single, uneven": Form(
        _uneven, _uneven_gives, tensors=lambda size: _ROWS * size, laid=True, laid_out=True
    ),
    "all_to_all, uneven": Form(
        _uneven_lists, _uneven_lists_give, tensors=lambda size: _ROWS * size, hosts=False
    ),
}
