"""Tensors that stand in for others in a module's slots, and what becomes of changes to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from anydevice.devices import parse_device
from anydevice.tensors import move_tensor
from anydevice.transfer.device_copy import attributes_back, pass_gradient_on
from anydevice.weights import Slot, exchange

__all__ = ["SwappedTensor", "swap_back"]


class SwappedTensor(NamedTuple):
    """A device copy in the slot of its original.

    Attributes:
        slot: which slot.
        original: the tensor that is in the slot before and after.
        copy: the device copy.
        version: the copy's version when it was made.
        address: of the copy's data when it was made.
        attributes: of the copy when it was made.
    """

    slot: Slot
    original: torch.Tensor
    copy: torch.Tensor
    version: int
    address: int
    attributes: dict[str, Any]

    @classmethod
    def of(cls, slot: Slot, original: torch.Tensor, copy: torch.Tensor) -> SwappedTensor:
        """Note the state of a copy before it is used."""
        return cls(slot, original, copy, copy._version, _address(copy), dict(copy.__dict__))

    def changed(self) -> bool:
        """Whether the copy's values were changed in place."""
        return self.copy._version != self.version or _address(self.copy) != self.address


def swap_back(swapped: list[SwappedTensor], device: torch.device, *, compares: bool) -> None:
    """Put originals back into their slots, with the changes that were made to their copies.

    Args:
        swapped: emptied, one by one; after an interrupt, call again with what is left.
        device: of the copies.
        compares: whether all are compared, to find changes that no version shows.

    Raises:
        Exception: the first that came up; all slots have their originals nevertheless.
    """
    busy = {id(s.slot.module) for s in swapped if s.slot.is_buffer and s.changed()}
    written: set[int] = set()
    failure: Exception | None = None
    while swapped:
        try:
            _restore(swapped[-1], busy, written, device, compares)
        except Exception as error:  # noqa: BLE001 - every slot must get its tensor back
            failure = failure or error
            swap = swapped[-1]
            if swap.slot.get() is swap.copy:
                swap.slot.put(swap.original)
            del swap
        swapped.pop()
    if failure is not None:
        raise failure


def _restore(
    swap: SwappedTensor, busy: set[int], written: set[int], device: torch.device, compares: bool
) -> None:
    slot, original, copy = swap.slot, swap.original, swap.copy
    now = slot.get()
    if now is copy:
        if id(copy) not in written:
            if swap.changed():
                _write_back(slot, original, copy)
            elif compares or (slot.is_buffer and _is_doubtful(slot.module, busy)):
                _write_differences_back(original, copy)
            written.add(id(copy))
        if swap.attributes or copy.__dict__:
            attributes_back(copy, original, swap.attributes)
        # Last: until here, an interrupted call can be repeated.
        slot.put(original)
        if copy.requires_grad and copy.is_leaf:
            pass_gradient_on(copy, original)
    elif now is not None and now is not original and now.device == device:
        _settle(slot, now, original.device)


def _is_doubtful(module: nn.Module, busy: set[int]) -> bool:
    """Whether a module may have changed its buffers without a change of their versions.

    Batch norm's kernel updates the running statistics so; it counts its batches in a buffer next to
    them, whose version shows it. Others write to ``buffer.data`` while they are trained.
    """
    if id(module) in busy:
        return True
    is_norm = isinstance(module, nn.modules.batchnorm._NormBase)
    return module.training and (is_norm or torch.is_grad_enabled())


def _write_back(slot: Slot, original: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(original.is_inference()), torch.no_grad():
        if original.shape == copy.shape:
            original.copy_(copy)
            return
        value = move_tensor(copy.detach(), parse_device(original.device))
        slot.put(original)
        exchange(slot, value)


def _write_differences_back(original: torch.Tensor, copy: torch.Tensor) -> None:
    with torch.inference_mode(original.is_inference()), torch.no_grad():
        value = move_tensor(copy.detach(), parse_device(original.device)).to(original.dtype)
        if not torch.equal(value, original):
            original.copy_(value)


def _settle(slot: Slot, new: torch.Tensor, device: torch.device) -> None:
    """Offload what forward put into the slot to where its predecessor is."""
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
