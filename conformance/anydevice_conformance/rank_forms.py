"""The forms in which collectives are called: each with what it must give to each rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_form import Form, Place, Tensors
from anydevice_conformance.rank_kind import SUMMED

__all__ = ["FORMS"]

_NOTHING: Final[Any] = None


def _works(work: Any) -> list[Any]:
    return [work] if work is not None else []


def _other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float32 if tensor.dtype is not torch.float32 else torch.int64)


def _all_reduce(operation: Any, reduced: Callable[[torch.Tensor], torch.Tensor]) -> Form:
    def call(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
        return _works(dist.all_reduce(mine[0], op=operation, **place.group)), mine

    return Form(
        call,
        lambda place, all_: [reduced(torch.stack([one[0] for one in all_]))],
        summed=True,
        dtypes=SUMMED,
        future=True,
        any_shape=True,
        laid=True,
        wrong=lambda place, tensor: dist.all_reduce(_NOTHING, **place.group),
    )


def _sum(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.sum(0, dtype=stacked.dtype)


def _mean(stacked: torch.Tensor) -> torch.Tensor:
    return _sum(stacked) / len(stacked)


def _broadcast(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    return _works(dist.broadcast(mine[0], **place.rooted("src"), **place.group)), mine


def _all_gather(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    pieces = [place.room(mine[0]) for _ in place.members.ranks]
    return _works(dist.all_gather(pieces, mine[0], **place.group)), pieces


def _firsts(place: Place, all_: list[Tensors]) -> Tensors:
    return [one[0] for one in all_]


def _into(name: str, joined: bool) -> Form:
    """All-gather into one tensor: the ranks' pieces one after another, or stacked."""

    def call(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
        whole = place.room(_joined([mine[0]] * place.members.size, joined))
        return _works(getattr(dist, name)(whole, mine[0], **place.group)), [whole]

    def wrong(place: Place, tensor: torch.Tensor) -> None:
        getattr(dist, name)(None, tensor, **place.group)

    return Form(
        call,
        lambda place, all_: [_joined(_firsts(place, all_), joined)],
        needed=True,
        hosts=joined,
        laid=True,
        wrong=wrong,
    )


def _scatter_sum(name: str, joined: bool, operation: Any, reduced: Any) -> Form:
    """Reduce-scatter of one tensor: the ranks' parts one after another, or stacked."""

    def call(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
        part, whole = place.room(mine[0]), place.lay(_joined(mine, joined))
        work = getattr(dist, name)(part, whole, op=operation, **place.group)
        return _works(work), [part]

    def wrong(place: Place, tensor: torch.Tensor) -> None:
        getattr(dist, name)(None, tensor, **place.group)

    return Form(
        call,
        lambda place, all_: [reduced(torch.stack([one[place.members.rank] for one in all_]))],
        tensors=lambda size: size,
        summed=True,
        dtypes=SUMMED[:2],
        needed=operation is dist.ReduceOp.SUM,
        hosts=joined,
        laid=True,
        wrong=wrong,
    )


def _joined(tensors: Tensors, joined: bool) -> torch.Tensor:
    stacked = torch.stack(tensors)
    return stacked.flatten(0, 1) if joined and stacked.dim() > 1 else stacked


def _reduce_scatter(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    part = place.room(mine[0])
    return _works(dist.reduce_scatter(part, mine, **place.group)), [part]


def _reduce(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    return _works(dist.reduce(mine[0], **place.rooted("dst"), **place.group)), mine


def _gather(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    pieces = [place.room(mine[0]) for _ in place.members.ranks] if place.is_root else None
    work = dist.gather(mine[0], pieces, **place.rooted("dst"), **place.group)
    return _works(work), pieces or []


def _scatter(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    part, given = place.room(mine[0]), mine if place.is_root else None
    return _works(dist.scatter(part, given, **place.rooted("src"), **place.group)), [part]


def _all_to_all(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    came = [place.room(one) for one in mine]
    return _works(dist.all_to_all(came, mine, **place.group)), came


def _all_to_all_single(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    whole = place.lay(torch.stack(mine))
    came = place.room(whole)
    return _works(dist.all_to_all_single(came, whole, **place.group)), [came]


def _uneven(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """Rank r sends r + s rows to rank s."""
    size, rank = place.members.size, place.members.rank
    counts = [rank + other for other in range(size)]
    rows = torch.stack([mine[0]] * sum(counts)) if sum(counts) else mine[0][None][:0]
    came = place.room(rows)
    work = dist.all_to_all_single(came, rows, counts, counts, **place.group)
    return _works(work), [came]


def _uneven_gives(place: Place, all_: list[Tensors]) -> Tensors:
    rank = place.members.rank
    rows = [all_[other][0] for other in range(place.members.size) for _ in range(rank + other)]
    return [torch.stack(rows) if rows else all_[rank][0][None][:0]]


def _transposed(place: Place, all_: list[Tensors]) -> Tensors:
    return [one[place.members.rank] for one in all_]


def _messages(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """Two messages to the next rank, and two from the one before; odd ranks receive first."""
    group, size, rank = place.members.group, place.members.size, place.members.rank
    came = [place.room(one) for one in mine]
    to, source = place.rooted("dst", (rank + 1) % size), place.rooted("src", (rank - 1) % size)
    works: list[Any] = []

    def send() -> None:
        for one in mine:
            if place.handle:
                works.append(dist.isend(one, group=group, **to))
            else:
                dist.send(one, group=group, **to)

    def receive() -> None:
        for one in came:
            if place.handle:
                works.append(dist.irecv(one, group=group, **source))
            else:
                told = dist.recv(one, group=group, **source)
                wanted = place.members.ranks[(rank - 1) % size]
                assert told in (wanted, (rank - 1) % size), f"recv from {wanted} returned {told}"

    for step in (receive, send) if rank % 2 else (send, receive):
        step()
    return works, came


def _batch(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    """As `_messages`, in one batch."""
    group, size, rank = place.members.group, place.members.size, place.members.rank
    came = [place.room(one) for one in mine]
    to, source = (place.members.ranks[(rank + by) % size] for by in (1, -1))
    sent = [dist.P2POp(dist.isend, one, to, group) for one in mine]
    received = [dist.P2POp(dist.irecv, one, source, group) for one in came]
    works = list(dist.batch_isend_irecv(received + sent if rank % 2 else sent + received))
    if not place.handle:  # it always gives handles
        for work in works:
            work.wait()
    return works, came


def _from_before(place: Place, all_: list[Tensors]) -> Tensors:
    return all_[(place.members.rank - 1) % place.members.size]


def _no_dtype(place: Place, tensor: torch.Tensor) -> None:
    pieces = [_other_dtype(tensor) for _ in place.members.ranks]
    dist.all_gather(pieces, tensor, **place.group)


_JOINS: Final = {
    f"{name}, {word}": _into(name, word == "joined")
    for name in ("all_gather_into_tensor", "all_gather_single")
    if hasattr(dist, name)
    for word in ("joined", "stacked")
}
_PARTS: Final = {
    f"{name}, {word}": _scatter_sum(name, word != "stacked", operation, reduced)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single")
    if hasattr(dist, name)
    for word, operation, reduced in (
        ("joined", dist.ReduceOp.SUM, _sum),
        ("stacked", dist.ReduceOp.SUM, _sum),
        ("greatest", dist.ReduceOp.MAX, lambda stacked: stacked.amax(0)),
        ("mean", dist.ReduceOp.AVG, _mean),
    )
}
#: Name to form.
FORMS: Final[dict[str, Form]] = {
    "all_reduce": dataclasses.replace(_all_reduce(dist.ReduceOp.SUM, _sum), needed=True),
    "all_reduce, greatest": _all_reduce(dist.ReduceOp.MAX, lambda stacked: stacked.amax(0)),
    "all_reduce, mean": dataclasses.replace(
        _all_reduce(dist.ReduceOp.AVG, _mean), dtypes=SUMMED[:1]
    ),
    "broadcast": Form(
        _broadcast,
        lambda place, all_: [all_[place.root][0]],
        needed=True,
        any_shape=True,
        laid=True,
        wrong=lambda place, tensor: dist.broadcast(_NOTHING, src=0, **place.group),
    ),
    "all_gather": Form(
        _all_gather, _firsts, needed=True, any_shape=True, laid=True, wrong=_no_dtype
    ),
    **_JOINS,
    **_PARTS,
    "reduce_scatter": Form(
        _reduce_scatter,
        lambda place, all_: [_sum(torch.stack([one[place.members.rank] for one in all_]))],
        tensors=lambda size: size,
        summed=True,
        dtypes=SUMMED[:2],
    ),
    "reduce": Form(
        _reduce,
        lambda place, all_: [_sum(torch.stack(_firsts(place, all_)))] if place.is_root else None,
        summed=True,
        dtypes=SUMMED,
    ),
    "gather": Form(_gather, lambda place, all_: _firsts(place, all_) if place.is_root else []),
    "scatter": Form(
        _scatter,
        lambda place, all_: [all_[place.root][place.members.rank]],
        tensors=lambda size: size,
    ),
    "all_to_all": Form(_all_to_all, _transposed, tensors=lambda size: size),
    "all_to_all_single": Form(
        _all_to_all_single,
        lambda place, all_: [torch.stack(_transposed(place, all_))],
        tensors=lambda size: size,
        laid=True,
    ),
    "all_to_all_single, uneven": Form(_uneven, _uneven_gives),
    "two messages": Form(_messages, _from_before, tensors=lambda size: 2, paired=True, needed=True),
    "a batch of messages": Form(_batch, _from_before, tensors=lambda size: 2, paired=True),
}
