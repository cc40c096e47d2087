"""Where weights rest: each distinct tensor with all its names, and moving it there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable

import torch

from anydevice.devices import CPU, Device
from anydevice.errors import ModelError
from anydevice.modules import Slot, exchange
from anydevice.sizes import tie_key
from anydevice.tensors import move_tensor

__all__ = ["Weight", "gather_weights"]

#: Says where the tensor of a full name shall rest.
Where = Callable[[str, Slot], Device]


@dataclasses.dataclass
class Weight:
    """One tensor of a model; several names when it is tied.

    Attributes:
        names: its full names.
        slots: where it stands; one for each name.
        rest: where it shall rest.
    """

    names: list[str]
    slots: list[Slot]
    rest: Device

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor."""
        tensor = self.slots[0].get()
        assert tensor is not None
        return tensor

    @property
    def is_there(self) -> bool:
        """Whether it is on the device that it shall rest on (for the disk: on the host)."""
        return self.tensor.device == self.rest.torch

    def hold(self, value: torch.Tensor) -> None:
        """Let the tensor hold a value, device and all; a Parameter stays the same object.

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
        exchange(self.slots[0], value)
        new = self.tensor
        for slot, before in zip(self.slots[1:], held[1:], strict=True):
            if before is old:
                slot.put(new)
            else:  # another Parameter over the same memory: so it shall stay
                exchange(slot, new)

    def check_value(self) -> None:
        """Make sure that there is a value to move.

        Raises:
            ModelError: it is on meta.
        """
        if self.tensor.is_meta:
            raise ModelError(f"{self.names[0]} is on meta: it has no value to move to {self.rest}")

    def move(self) -> None:
        """Bring it where it shall rest.

        Raises:
            ModelError: it is on meta.
        """
        self.check_value()
        if not self.is_there:
            device = self.rest if self.rest.is_accelerator else CPU
            self.hold(move_tensor(self.tensor.detach(), device))


def gather_weights(named: Iterable[tuple[str, Slot]], where: Where) -> list[Weight]:
    """Collect the distinct tensors of some slots.

    A tied tensor rests on the first accelerator that any of its names is bound for, else on the
    host, else on the disk.

    Args:
        named: full names and slots.
        where: says where each shall rest.
    """
    weights: dict[Hashable, Weight] = {}
    for name, slot in named:
        device = where(name, slot)
        key = tie_key(slot.table[slot.name])
        weight = weights.get(key)
        if weight is None:
            weights[key] = Weight([name], [slot], device)
            continue
        weight.names.append(name)
        weight.slots.append(slot)
        if _speed(device) > _speed(weight.rest):
            weight.rest = device
    return list(weights.values())


def _speed(device: Device) -> int:
    return 2 if device.is_accelerator else 1 if device == CPU else 0
