"""Batched copies: many tensors are moved to a device in few copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from anydevice import registry
from anydevice.devices import Device
from anydevice.tensors import move_tensor
from anydevice.transfer.copy_plan import is_copied_as_bytes, plan_copies, tensor_at
from anydevice.transfer.pinning import PinBudget, pin_host_tensors
from anydevice.transfer.queue import DeviceQueue

__all__ = ["copy_batch", "page_lock"]

#: Tensors share device memory in batches of about so many bytes; it is freed batch by batch.
_BATCH: Final = 64 << 20


def copy_batch(tensors: Sequence[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """Copy tensors to a device, in few copies that are queued together.

    From the host to a device with streams they are copied on a stream of their own, concurrently
    with what the device still computes; the current stream's later work finds them there, and the
    host does not wait (except for memory that is not page-locked, which it must read). All others
    are moved one by one.

    Args:
        tensors: on any device; detached. A tensor that comes twice is copied once.
        device: where to; a tensor that is there already is returned itself.

    Returns:
        Tensors on ``device``, each with the strides of its original where that is dense.

    Raises:
        RuntimeError: the device has no memory for them.

    Example:
        >>> import torch
        >>> from anydevice.devices import CPU
        >>> from anydevice.transfer import copy_batch
        >>> copy_batch([torch.ones(2)], CPU)
        [tensor([1., 1.])]
    """
    found: dict[int, torch.Tensor] = {}
    queue = DeviceQueue(device)
    with torch.inference_mode(False), torch.no_grad():
        together = []
        for tensor in {id(t): t for t in tensors}.values():
            if queue.has_streams and is_copied_as_bytes(tensor):
                together.append(tensor)
            else:
                found[id(tensor)] = move_tensor(tensor, device)
        try:
            for batch in _batches(together):
                _copy_batch(batch, queue, found)
        finally:
            # Also when it fails: queued copies still write to memory that is given back now.
            queue.wait(queue.current_stream(), queue.record(queue.copy_stream))
    return [found[id(tensor)] for tensor in tensors]


def page_lock(tensors: Sequence[torch.Tensor], device: Device) -> None:
    """Page-lock host tensors, once, so that `copy_batch` need not stop the host for them.

    Where the device does not claim page-locked memory, or too little host memory is free, they stay
    as they are; so do views of files.

    Args:
        tensors: on the host; each keeps its identity, and its data moves.
        device: where they will be copied to.
    """
    backend = registry.get_backend(device.torch)
    if device.is_accelerator and backend.capabilities.pinned_memory:
        pin_host_tensors(tensors, backend, PinBudget(None), mapped=False)


def _copy_batch(
    batch: list[torch.Tensor], queue: DeviceQueue, found: dict[int, torch.Tensor]
) -> None:
    plan = plan_copies(batch, queue.pins)
    flat = queue.allocate(plan.nbytes)
    queue.wait(queue.copy_stream, queue.record(queue.current_stream()))  # its last reader
    with queue.copying():
        for run in plan.runs:
            run.copy(batch, flat)
    for piece in plan.pieces:
        found[id(batch[piece.weight])] = tensor_at(flat, piece.offset, batch[piece.weight])


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    batch: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if batch and size + tensor.nbytes > _BATCH:
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += tensor.nbytes
    if batch:
        yield batch
