"""Moving the weights of a model: all of them, or none.

First every value is made on its new device. When all are there, they are put into the model, which
can no longer fail. So a device that runs out of memory before that, or an interrupt, leaves the
model as it was.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from anydevice.devices import CPU, Device, parse_device, synchronize
from anydevice.interrupts import check, uninterrupted
from anydevice.optimizer_state import note_moved
from anydevice.tensors import move_tensor
from anydevice.ties import Weight

__all__ = ["Relocation", "move_weights"]


class Relocation:
    """New values of weights, and of the gradients that they have.

    Example::

        relocation = Relocation()
        for weight in weights:
            relocation.add(weight)
        relocation.commit()
    """

    def __init__(self) -> None:
        self._values: list[tuple[Weight, torch.Tensor, dict[int, torch.Tensor]]] = []
        self._devices: set[Device] = set()

    def add(self, weight: Weight, value: torch.Tensor | None = None) -> None:
        """Make a weight's new value; nothing is done where it is there already.

        Args:
            weight: knows the device that it is to be stored on.
            value: what it is to hold; by default what it holds now.

        Raises:
            ModelError: it is on meta, and no value is given.
            RuntimeError: the device has no memory for it.
        """
        check()
        if value is None:
            weight.check_value()
            if weight.is_there and not weight.tensor.is_inference():
                return
        device = weight.device if weight.device.is_accelerator else CPU
        source = weight.tensor.detach() if value is None else value.detach()
        self._settle(parse_device(source.device))
        moved = move_tensor(source, device)
        if moved.is_inference():  # made under inference_mode: it could not be trained
            moved = moved.clone()
        gradients = {
            id(tensor): move_tensor(tensor.grad.detach(), device).to(moved.dtype)
            for slot in weight.slots
            if (tensor := slot.get()) is not None
            and tensor.grad is not None
            and not tensor.grad.is_meta
        }
        self._devices.add(device)
        self._values.append((weight, moved, gradients))

    def commit(self) -> None:
        """Put all values into the model."""
        synchronize(self._devices)
        note_moved(
            tensor
            for weight, _, _ in self._values
            for slot in weight.slots
            if isinstance(tensor := slot.get(), torch.nn.Parameter)
        )
        while self._values:
            weight, value, gradients = self._values.pop()
            weight.hold(value, gradients)

    def _settle(self, device: Device) -> None:
        """Wait for what the caller has queued on a device, perhaps on a stream of its own."""
        if device not in self._devices:
            self._devices.add(device)
            synchronize([device])


def move_weights(weights: Iterable[Weight]) -> None:
    """Move weights to the devices that they are to be stored on: all of them, or none.

    Raises:
        ModelError: one is on meta.
        RuntimeError: a device has no memory for them.
    """

    def move() -> None:
        relocation = Relocation()
        for weight in weights:
            relocation.add(weight)
        relocation.commit()

    uninterrupted(move)
