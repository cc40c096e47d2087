"""Forms of collectives that are built on others: coalesced, and of objects."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_form import Form, Place, Tensors
from anydevice_conformance.rank_forms import FORMS
from anydevice_conformance.rank_messages import MESSAGES

__all__ = ["ALL_FORMS"]


def _many(name: str) -> Form:
    """Three of a form at once, as one, where torch has a way to say so."""
    form = FORMS[name]

    def call(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
        from torch.distributed.distributed_c10d import _coalescing_manager

        each, outputs = form.tensors(place.members.size), []
        plain = dataclasses.replace(place, handle=False)
        with _coalescing_manager(place.members.group, async_ops=place.handle) as manager:
            for start in range(0, len(mine), each):
                outputs += form.call(plain, mine[start : start + each])[1]
        return [manager] if place.handle else [], outputs

    def gives(place: Place, all_: list[Tensors]) -> Tensors:
        each, found = form.tensors(place.members.size), []
        for start in range(0, len(all_[0]), each):
            found += form.gives(place, [one[start : start + each] for one in all_]) or []
        return found

    return dataclasses.replace(
        form,
        call=call,
        gives=gives,
        tensors=lambda size: 3 * form.tensors(size),
        needed=False,
        future=False,
        laid=False,
        laid_out=False,
        wrong=None,
    )


#: Characters of the text that goes with a tensor: objects of the ranks differ in length.
_LENGTHS: Final = (0, 3, 700, 5_000, 70_000)


def _object(place: Place, tensor: torch.Tensor, rank: int) -> Any:
    """What a rank tells: its tensor, and a text of some length."""
    length = _LENGTHS[(place.seed + 3 * rank) % len(_LENGTHS)]
    return {"tensor": tensor.cpu(), "text": chr(97 + rank) * length, "rank": (rank, None)}


def _tensor(place: Place, told: Any, rank: int) -> torch.Tensor:
    """The tensor of what a rank has told."""
    wanted = _object(place, torch.empty(0), rank)
    same = isinstance(told, dict) and all(told[key] == wanted[key] for key in ("text", "rank"))
    assert same, f"the object of rank {rank} of the group is another one: {told!s:.100}"
    tensor: torch.Tensor = told["tensor"]
    return tensor


def _objects_of_all(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    found: list[Any] = [None] * place.members.size
    own = _object(place, mine[0], place.members.rank)
    dist.all_gather_object(found, own, group=place.members.group)
    return [], [_tensor(place, one, rank) for rank, one in enumerate(found)]


def _told_by_root(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    return _told(place, mine, {})


def _told_by_device(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    return _told(place, mine, {"device": place.device})


def _told(place: Place, mine: Tensors, way: dict[str, Any]) -> tuple[list[Any], Tensors]:
    given = [_object(place, mine[0], place.root), "and", None]
    told: list[Any] = given if place.is_root else [None, None, 3]
    dist.broadcast_object_list(told, group=place.members.group, **way, **place.rooted("src"))
    assert told[1:] == ["and", None], f"broadcast_object_list gave {told[1:]!r} for ['and', None]"
    return [], [_tensor(place, told[0], place.root)]


def _objects_at_root(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    found: Any = [None] * place.members.size if place.is_root else None
    own = _object(place, mine[0], place.members.rank)
    dist.gather_object(own, found, group=place.members.group, **place.rooted("dst"))
    return [], [_tensor(place, one, rank) for rank, one in enumerate(found or [])]


def _objects_from_root(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    found: list[Any] = [None]
    given = [_object(place, one, rank) for rank, one in enumerate(mine)] if place.is_root else None
    dist.scatter_object_list(found, given, group=place.members.group, **place.rooted("src"))
    return [], [_tensor(place, found[0], place.members.rank)]


def _firsts(place: Place, all_: list[Tensors]) -> Tensors:
    return [one[0] for one in all_]


_COALESCED: Final = {
    f"{name}, three as one": _many(name)
    for name in ("all_reduce", "all_gather_single, joined", "reduce_scatter_single, joined")
    if name in FORMS
}
#: Name to form, of all.
ALL_FORMS: Final[dict[str, Form]] = {
    **FORMS,
    **MESSAGES,
    **_COALESCED,
    "all_gather_object": Form(_objects_of_all, _firsts, rare=(), needed=True),
    "broadcast_object_list": Form(
        _told_by_root, lambda place, all_: [all_[place.root][0]], rare=(), needed=True
    ),
    "broadcast_object_list by the device": Form(
        _told_by_device, lambda place, all_: [all_[place.root][0]], rare=()
    ),
    "gather_object": Form(
        _objects_at_root, lambda place, all_: _firsts(place, all_) if place.is_root else [], rare=()
    ),
    "scatter_object_list": Form(
        _objects_from_root,
        lambda place, all_: [all_[place.root][place.members.rank]],
        rare=(),
        tensors=lambda size: size,
    ),
}
