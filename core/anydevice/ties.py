"""Tied weights, and the distinct tensors of a model with all of their names."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.devices import CPU, Device, parse_device
from anydevice.errors import ModelError
from anydevice.tensors import storage_address
from anydevice.weights import Slot, covering_name, exchange, find_slot, iter_slots

__all__ = [
    "Ties",
    "Weight",
    "check_tied_parameters_on_same_device",
    "find_tied_parameters",
    "gather_weights",
    "list_weights",
    "place_weights",
    "retie_parameters",
    "tie_groups",
    "tie_key",
]


class Ties:
    """Numbers the distinct tensors of a model: tied ones, met later, get the number of the first.

    Two tensors are tied when they are the same object or the same view of one storage, on meta too.
    Views of different parts of a storage are not tied. The tensors must stay alive.
    """

    def __init__(self) -> None:
        self._count = 0
        self._by_id: dict[int, int] = {}
        #: The first tensor of each storage and its number, by the storage's address.
        self._first: dict[int, tuple[torch.Tensor, int]] = {}
        #: Numbers by address and view, of storages that have several tensors.
        self._by_view: dict[tuple[Any, ...], int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor: from 0 up, in the order in which they are met."""
        key = id(tensor)
        known = self._by_id.get(key)
        if known is not None:
            return known
        number = self._count
        address = storage_address(tensor)
        if address is not None:
            first = self._first.setdefault(address, (tensor, number))
            if first[0] is not tensor:  # a view of the same storage, perhaps the very same view
                self._by_view.setdefault((address, *_view(first[0])), first[1])
                number = self._by_view.setdefault((address, *_view(tensor)), number)
        self._by_id[key] = number
        self._count = max(self._count, number + 1)
        return number


def _view(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def tie_key(tensor: torch.Tensor) -> Hashable:
    """Equal for two tensors that are tied (see `Ties`), as long as both live."""
    address = storage_address(tensor)
    return id(tensor) if address is None else (address, *_view(tensor))


def tie_groups(slots: Iterable[tuple[str, Slot]]) -> list[list[tuple[str, Slot]]]:
    """Full names and slots, as `iter_slots` gives them, by the distinct tensors in them."""
    ties = Ties()
    groups: list[list[tuple[str, Slot]]] = []
    for named in slots:
        slot = named[1]
        number = ties.number(slot.table[slot.name])
        if number == len(groups):
            groups.append([])
        groups[number].append(named)
    return groups


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find parameters and buffers that are one tensor under several names.

    Two names are tied when they hold the same object or the same view of one storage; a module that
    is registered twice ties all it holds. Works on meta.

    Returns:
        One list of names for each such tensor, in the model's order.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import find_tied_parameters
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> model[1].weight = model[0].weight
        >>> find_tied_parameters(model)
        [['0.weight', '1.weight']]
    """
    return [
        [name for name, _ in group] for group in tie_groups(iter_slots(model)) if len(group) > 1
    ]


def retie_parameters(model: nn.Module, tied_params: Iterable[Sequence[str]]) -> None:
    """Make tied names hold one tensor again, where the tie was broken.

    Args:
        model: the model that holds them all.
        tied_params: groups of names, as from `find_tied_parameters`. The first of a group that
            holds data (is not on meta) is kept; a group wholly on meta is tied there.

    Raises:
        ModelError: the model has no such name.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import retie_parameters
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> retie_parameters(model, [["0.weight", "1.weight"]])
        >>> model[0].weight is model[1].weight
        True
    """
    for group in tied_params:
        slots = [find_slot(model, name) for name in group]
        tensors = [tensor for slot in slots if (tensor := slot.get()) is not None]
        kept = next((t for t in tensors if not t.is_meta), tensors[0] if tensors else None)
        for slot in slots:
            slot.put(kept)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, Any]
) -> None:
    """Warn where a map puts names of one tensor on several devices: it is copied to each.

    Args:
        tied_params: groups of names, as from `find_tied_parameters`.
        device_map: module names to devices.

    Example:
        >>> from anydevice.utils.modeling import check_tied_parameters_on_same_device
        >>> check_tied_parameters_on_same_device([["a.weight", "b.weight"]], {"": "cpu"})
    """
    for group in tied_params:
        keys = {name: covering_name(name, device_map) for name in group}
        places = {name: None if key is None else device_map[key] for name, key in keys.items()}
        if len({str(place) for place in places.values()}) > 1:
            warnings.warn(
                f"the device map puts tied parameters on different devices: {places}. Put their "
                "modules on one device, or give device_map='auto'",
                stacklevel=2,
            )


# ---------------------------------------------------------------------- weights and their devices


@dataclasses.dataclass
class Weight:
    """One tensor of a model; several names when it is tied.

    Attributes:
        names: its full names.
        slots: where it stands; one for each name.
        device: where it is to be stored: an accelerator, the host or the disk.
    """

    names: list[str]
    slots: list[Slot]
    device: Device

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        tensor = self.slots[0].get()
        assert tensor is not None
        return tensor

    @property
    def is_there(self) -> bool:
        """Whether it is on the device that it is to be stored on (for the disk: on the host)."""
        return self.tensor.device == self.device.torch

    def hold(
        self, value: torch.Tensor, gradients: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        """Let the tensor hold a value, on the value's device; a Parameter stays the same object.

        Args:
            value: what it is to hold.
            gradients: by the id of a Parameter, what its gradient is on the value's device; by
                default gradients are moved there.

        Raises:
            ModelError: its shape is another, or the tensor cannot be exchanged now.
        """
        old = self.tensor
        if old.shape != value.shape:
            raise ModelError(
                f"{self.names[0]} has shape {tuple(old.shape)}, the value given for it "
                f"{tuple(value.shape)}"
            )
        held = [slot.get() for slot in self.slots]
        gradients = gradients or {}
        exchange(self.slots[0], value, gradients.get(id(old)))
        new = self.tensor
        for slot, before in zip(self.slots[1:], held[1:], strict=True):
            if before is old:
                slot.put(new)
            else:  # another Parameter over the same memory stays one
                exchange(slot, new, gradients.get(id(before)))

    def check_value(self) -> None:
        """Make sure that there is a value to move.

        Raises:
            ModelError: it is on meta.
        """
        if self.tensor.is_meta:
            raise ModelError(
                f"{self.names[0]} is on meta: it has no value to move to {self.device}"
            )


def gather_weights(
    named: Iterable[tuple[str, Slot]], where: Callable[[str, Slot], Device]
) -> list[Weight]:
    """Collect the distinct tensors of some slots.

    A tied tensor is stored on the first accelerator that any of its names is placed on, else on the
    host, else on the disk.

    Args:
        named: full names and slots.
        where: the device of a full name and its slot.
    """
    weights = _weights(named)
    place_weights(weights, where)
    return weights


def place_weights(weights: Iterable[Weight], where: Callable[[str, Slot], Device]) -> None:
    """Set the devices of weights as `gather_weights` does."""
    for weight in weights:
        weight.device = min(map(where, weight.names, weight.slots), key=_TIER)


def list_weights(model: nn.Module) -> list[Weight]:
    """The distinct tensors of a model in its order, each to be stored where it is now.

    What is on meta, or nowhere yet, is to be stored on the host.
    """
    weights = _weights(iter_slots(model))
    for weight in weights:
        if not weight.tensor.is_meta:
            weight.device = parse_device(weight.tensor.device)
    return weights


def _weights(named: Iterable[tuple[str, Slot]]) -> list[Weight]:
    groups = (zip(*group, strict=True) for group in tie_groups(named))
    return [Weight(list(names), list(slots), CPU) for names, slots in groups]


_TIER: Final = operator.attrgetter("tier")
