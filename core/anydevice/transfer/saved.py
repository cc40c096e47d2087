"""Offloaded weights that autograd saves for a backward pass.

A forward with gradients on saves weights, and what is saved keeps its memory: the device copies of
all groups would stay on the device until a backward that may never come. So autograd gets a
reference to the original in place of its copy, and the copy is made again when backward needs it.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from anydevice.devices import Device
from anydevice.tensors import is_dense
from anydevice.transfer.device_copy import copy_values, is_transformed, moves_by_itself
from anydevice.transfer.swapping import SwappedTensor

__all__ = ["SavedWeights"]


class _SavedWeight(NamedTuple):
    """A saved view of a device copy."""

    original: torch.Tensor
    version: int
    device: Device
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _SavedTensor(NamedTuple):
    """Any other saved tensor, with its version: torch leaves that check to the hooks."""

    tensor: torch.Tensor
    version: int


class _SavedByOthers(NamedTuple):
    """What hooks that were there before made of a tensor, and how they undo it."""

    value: Any
    unpack: Any


class SavedWeights:
    """Hooks for tensors that autograd saves on the calling thread, during one call.

    Args:
        swapped: the device copies in use.
        device: where they are.
    """

    def __init__(self, swapped: Iterable[SwappedTensor], device: Device) -> None:
        self._device = device
        self._places = [
            (swap.address, swap)
            for swap in {id(s.copy): s for s in swapped}.values()
            if swap.address and not moves_by_itself(swap.original) and is_dense(swap.copy)
        ]
        self._places.sort(key=lambda place: place[0])
        self._outer: Any = None
        self._started = False
        self._pack = self.pack  # one object, so that it is recognised

    def start(self) -> None:
        """Begin. Hooks that are there already get every other tensor."""
        autograd: Any = torch._C._autograd
        if not self._places:
            return
        if autograd._saved_tensors_hooks_is_enabled() and not is_transformed():
            self._started = True
            self._outer = autograd._top_saved_tensors_default_hooks(True)
            autograd._push_saved_tensors_default_hooks(self._pack, _unpack)

    def stop(self) -> None:
        """End; may be called again, and in another order than others that have started since."""
        autograd: Any = torch._C._autograd
        later = []
        while self._started and (top := autograd._top_saved_tensors_default_hooks(True)):
            autograd._pop_saved_tensors_default_hooks()
            if top[0] is self._pack:
                break
            later.append(top)
        self._started = False
        for hooks in reversed(later):
            autograd._push_saved_tensors_default_hooks(*hooks)
        self._places = []  # graphs may hold this object

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps of a tensor."""
        found = self._find(tensor)
        if found is not None:
            return found
        if self._outer is not None:
            return _SavedByOthers(self._outer[0](tensor), self._outer[1])
        # Detached: an output that holds its own graph would never be freed.
        return _SavedTensor(tensor.detach(), tensor._version)

    def _find(self, tensor: torch.Tensor) -> _SavedWeight | _SavedTensor | None:
        """What stands for a view of an unchanged device copy; None for any other tensor."""
        if not self._places or tensor.device != self._device.torch or moves_by_itself(tensor):
            return None
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._places, address, key=lambda place: place[0]) - 1
        if index < 0:
            return None
        swap = self._places[index][1]
        copy, original = swap.copy, swap.original
        offset = (address - swap.address) // copy.dtype.itemsize
        last = offset + sum(
            (n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True)
        )
        if (
            tensor.dtype != copy.dtype
            or last >= copy.numel()
            or tensor.numel() == 0
            or tensor.is_conj()
            or tensor.is_neg()
            or swap.changed()
        ):
            return None
        if swap.slot.is_buffer:
            # Its original may be updated when the call ends, as running statistics are.
            with torch.no_grad():
                value = tensor.clone()
            return _SavedTensor(value, value._version)
        return _SavedWeight(
            original.detach(),
            original._version,
            self._device,
            copy.dtype,
            tensor.size(),
            tensor.stride(),
            offset,
        )


def _unpack(saved: Any) -> torch.Tensor:
    """The tensor that was saved.

    Raises:
        RuntimeError: it was changed since.
    """
    if isinstance(saved, _SavedByOthers):
        return saved.unpack(saved.value)  # type: ignore[no-any-return]
    if isinstance(saved, _SavedTensor):
        _require_version(saved.tensor, saved.version)
        return saved.tensor
    _require_version(saved.original, saved.version)
    with torch.no_grad():
        data = copy_values(saved.original, saved.device, saved.dtype)
        return data.as_strided(saved.size, saved.stride, data.storage_offset() + saved.offset)


def _require_version(tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
            f"expected version {version} instead."
        )
