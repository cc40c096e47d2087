"""How one weight gets its value, and putting the value into the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias

import torch
from torch import nn

from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.mapped import backing_of
from anydevice.devices import CPU, DISK
from anydevice.loading.match import Target
from anydevice.loading.shards import put_local
from anydevice.tensors import PLAIN_TYPES, move_tensor
from anydevice.weights import Slot, exchange

__all__ = [
    "LoadMethod",
    "give",
    "gradients_of",
    "is_view",
    "memory_to_fill",
    "method_of",
]

#: How a weight gets its value: a view of its file; read through buffers; converted as a whole;
#: written to the offload folder, and a view of that.
LoadMethod: TypeAlias = Literal["map", "stream", "convert", "write"]

_UNINITIALIZED: Final = (nn.UninitializedParameter, nn.UninitializedBuffer)


def is_view(info: TensorInfo) -> bool:
    """Whether it is a view of its file: one at an odd place is copied, see `MappedFile.tensor`."""
    return info.offset is not None and info.offset % info.dtype.itemsize == 0


def method_of(target: Target) -> LoadMethod:
    """How a weight gets its value, from where it is stored and where it goes."""
    in_file = target.info.offset is not None
    if target.device.type == DISK.type:
        return "write" if target.is_cast or not in_file else "map"
    if target.device.is_accelerator or target.is_cast:
        return "stream" if in_file else "convert"
    return "convert" if target.part is not None and not in_file else "map"


def memory_to_fill(target: Target) -> torch.Tensor | None:
    """The memory that the model has for a weight, if it can take the new value as it is."""
    old = target.old
    if target.part is not None:
        old = old.to_local()  # type: ignore[attr-defined]
    fits = (
        type(old) in PLAIN_TYPES
        and old.layout is torch.strided
        and not old.is_meta
        and old.device == target.device.torch
        and old.dtype == target.dtype
        and old.shape == target.shape
        and old.is_contiguous()
        and not old.is_inference()
        and backing_of(old) is None  # writing to a view of a file would cost a copy of its pages
    )
    return old.detach() if fits else None


def gradients_of(target: Target) -> dict[int, torch.Tensor]:
    """The gradients of a weight where it will be, by the ids of the Parameters that have them."""
    found: dict[int, torch.Tensor] = {}
    if target.part is not None or not (target.dtype.is_floating_point or target.dtype.is_complex):
        return found
    device = target.device if target.device.is_accelerator else CPU
    for slot in _one_each(target.slots):
        old = slot.get()
        if old is not None and old.grad is not None and not old.grad.is_meta:
            found[id(old)] = move_tensor(old.grad.detach(), device).to(target.dtype)
    return found


def give(target: Target, value: torch.Tensor, gradients: Mapping[int, torch.Tensor]) -> None:
    """Let all slots that hold one tensor hold the value; ties stay.

    Args:
        target: the weight.
        value: what it is to hold.
        gradients: see `gradients_of`.
    """
    for slot in _one_each(target.slots):
        if target.part is not None:
            put_local(slot.table, slot.name, value)
            continue
        old = slot.table[slot.name]
        if type(old) in _UNINITIALIZED:
            old.materialize(value.shape, dtype=value.dtype)
        exchange(slot, value, gradients.get(id(old)))


def _one_each(slots: list[Slot]) -> list[Slot]:
    """One slot of each Parameter; all of buffers, which are replaced."""
    if len(slots) == 1:
        return slots
    first: dict[int, Slot] = {}
    for slot in slots:
        first.setdefault(id(slot if slot.is_buffer else slot.get()), slot)
    return list(first.values())
