"""Forms of collectives that are built on others: coalesced, and of objects."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import torch.distributed as dist

from anydevice_conformance.rank_form import Form, Place, Tensors
from anydevice_conformance.rank_forms import FORMS

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
        wrong=None,
    )


def _objects_of_all(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    found: list[Any] = [None] * place.members.size
    dist.all_gather_object(found, mine[0].cpu(), group=place.members.group)
    return [], found


def _told_by_root(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    told: list[Any] = [mine[0].cpu(), "and"] if place.is_root else [None, None]
    dist.broadcast_object_list(told, group=place.members.group, **place.rooted("src"))
    assert told[1] == "and", f"broadcast_object_list gave {told[1]!r} for 'and'"
    return [], told[:1]


def _told_by_device(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    told: list[Any] = [mine[0].cpu()] if place.is_root else [None]
    dist.broadcast_object_list(
        told, group=place.members.group, device=place.device, **place.rooted("src")
    )
    return [], told


def _objects_at_root(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    found: Any = [None] * place.members.size if place.is_root else None
    dist.gather_object(mine[0].cpu(), found, group=place.members.group, **place.rooted("dst"))
    return [], found or []


def _objects_from_root(place: Place, mine: Tensors) -> tuple[list[Any], Tensors]:
    found: list[Any] = [None]
    given = [one.cpu() for one in mine] if place.is_root else None
    dist.scatter_object_list(found, given, group=place.members.group, **place.rooted("src"))
    return [], found


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
    **_COALESCED,
    "all_gather_object": Form(_objects_of_all, _firsts, needed=True),
    "broadcast_object_list": Form(
        _told_by_root, lambda place, all_: [all_[place.root][0]], needed=True
    ),
    "broadcast_object_list by the device": Form(
        _told_by_device, lambda place, all_: [all_[place.root][0]]
    ),
    "gather_object": Form(
        _objects_at_root, lambda place, all_: _firsts(place, all_) if place.is_root else []
    ),
    "scatter_object_list": Form(
        _objects_from_root,
        lambda place, all_: [all_[place.root][place.members.rank]],
        tensors=lambda size: size,
    ),
}
