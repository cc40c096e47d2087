"""Offloaded weights are page-locked once, so that they are copied at the link's full speed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.checkpoint.mapped import backing_of
from anydevice.devices import CPU
from anydevice.transfer.copy_plan import align, count_owners, is_copied_as_bytes
from anydevice.transfer.pinned_blocks import place_in_block

__all__ = ["PinBudget", "pin_host_tensors"]


class PinBudget:
    """How much host memory may still be page-locked.

    Args:
        nbytes: in all; None for half of what is free when it is first asked.
    """

    def __init__(self, nbytes: int | None) -> None:
        self._left = nbytes

    def take(self, nbytes: int) -> bool:
        """Take so many bytes, where they are left."""
        if self._left is None:
            self._left = registry.measure_memory(CPU.torch).free // 2
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True


def pin_host_tensors(
    originals: Sequence[torch.Tensor], backend: DeviceBackend, budget: PinBudget, *, mapped: bool
) -> None:
    """Move the data of host tensors to one block of page-locked memory.

    The tensors stay the same objects, each with a storage of its own, so that saving one does not
    save all. Left where they are: weights whose memory is shared (a view, another
    process), those that are page-locked already, and unless ``mapped`` views of a file.
    """
    chosen = [t for t in originals if _may_move(t) and (mapped or backing_of(t) is None)]
    offsets = [0]
    for tensor in chosen:
        offsets.append(offsets[-1] + align(tensor.nbytes))
    if not chosen or not budget.take(offsets[-1]):
        return
    try:
        block = backend.pin_memory(torch.empty(offsets[-1], dtype=torch.uint8, device="cpu"))
        if not block.is_pinned():
            return
    except RuntimeError:  # the system allows no more: go on without
        return
    with torch.inference_mode(False), torch.no_grad():
        for tensor, offset in zip(chosen, offsets, strict=False):
            new = place_in_block(block, offset, tensor)
            new.copy_(tensor)
            tensor.data = new


def _may_move(tensor: torch.Tensor) -> bool:
    return (
        is_copied_as_bytes(tensor)
        and not tensor.is_pinned()
        and not tensor.is_shared()  # type: ignore[no-untyped-call]
        and _is_sole_owner(tensor)
    )


def _is_sole_owner(tensor: torch.Tensor) -> bool:
    """Whether no other tensor views the memory: it would go on to view the old."""
    owners = count_owners(tensor)
    # The tensor is one, the Python object that is asked for the count is the other.
    return owners is not None and owners <= 2
