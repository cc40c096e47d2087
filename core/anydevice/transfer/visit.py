"""A visit: the time for which twins stand in a unit's slots."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from anydevice.devices import Device, parse_device
from anydevice.modules import Slot, exchange
from anydevice.tensors import move_tensor
from anydevice.transfer.twins import attributes_back

__all__ = ["Guest", "Visit"]


class Guest(NamedTuple):
    """A twin and where it stands.

    Attributes:
        slot: the place.
        rest: the tensor that stood there before, and will again.
        twin: the tensor that stands there meanwhile.
        version: the twin's version when it came.
        address: of the twin's data when it came.
        attributes: of the twin when it came.
    """

    slot: Slot
    rest: torch.Tensor
    twin: torch.Tensor
    version: int
    address: int
    attributes: dict[str, Any]

    @classmethod
    def of(cls, slot: Slot, rest: torch.Tensor, twin: torch.Tensor) -> Guest:
        """Note what a twin is like before anybody uses it."""
        return cls(slot, rest, twin, twin._version, _address(twin), dict(twin.__dict__))

    def changed(self) -> bool:
        """Whether the twin's values were changed in place."""
        return self.twin._version != self.version or _address(self.twin) != self.address


class Visit:
    """Twins of one unit on its device, and how many calls use them.

    Attributes:
        count: calls that are inside.
        guests: the twins.
    """

    def __init__(self, device: Device, guests: list[Guest]) -> None:
        self.device = device
        self.guests = guests
        self.count = 0

    def begin(self) -> None:
        """Put the twins into the slots."""
        for guest in self.guests:
            guest.slot.put(guest.twin)

    def end(self) -> None:
        """Put the resting tensors back, with the changes that were made on the device."""
        errors = []
        busy = {id(g.slot.module) for g in self.guests if g.slot.is_buffer and g.changed()}
        written: set[int] = set()
        for guest in self.guests:
            try:
                self._rest_again(guest, busy, written)
            except Exception as error:  # noqa: BLE001 - every slot must get its tensor back
                errors.append(error)
        self.guests = []
        if errors:
            raise errors[0]

    def _rest_again(self, guest: Guest, busy: set[int], written: set[int]) -> None:
        slot, rest, twin = guest.slot, guest.rest, guest.twin
        now = slot.table.get(slot.name, _GONE)
        if now is twin:
            slot.put(rest)
            if id(twin) not in written and (guest.changed() or _is_state(slot, busy)):
                written.add(id(twin))
                _write_back(slot, rest, twin)
            if len(twin.__dict__) or guest.attributes:
                attributes_back(twin, rest, guest.attributes)
        elif isinstance(now, torch.Tensor) and now.device == self.device.torch:
            _settle(slot, now, rest.device)


_GONE: Any = object()


def _is_state(slot: Slot, busy: set[int]) -> bool:
    """Whether a buffer may have been changed without its version telling.

    Batch norm's kernel updates the running statistics so. It counts its batches in a buffer beside
    them, so a buffer whose neighbour changed is taken to have changed.
    """
    if not slot.is_buffer:
        return False
    module = slot.module
    return id(module) in busy or (
        module.training and isinstance(module, nn.modules.batchnorm._NormBase)
    )


def _write_back(slot: Slot, rest: torch.Tensor, twin: torch.Tensor) -> None:
    with torch.inference_mode(rest.is_inference()), torch.no_grad():
        if rest.shape == twin.shape:
            rest.copy_(twin)
        else:
            exchange(slot, move_tensor(twin.detach(), parse_device(rest.device)))


def _settle(slot: Slot, new: torch.Tensor, device: torch.device) -> None:
    """Let what forward put into the slot rest where its predecessor did."""
    place = parse_device(device)
    if isinstance(new, nn.Parameter):
        exchange(slot, move_tensor(new.detach(), place))
    else:
        slot.put(move_tensor(new, place))


def _address(tensor: torch.Tensor) -> int:
    """Where the tensor's data are; 0 where its layout or class has no such thing."""
    if tensor.layout is not torch.strided:
        return 0
    try:
        return tensor.data_ptr()
    except (RuntimeError, NotImplementedError):
        return 0
