"""Tensors that move house: they come to original on another device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from anydevice import registry
from anydevice.devices import Device
from anydevice.tensors import move_tensor
from anydevice.transfer.copy_plan import align, bytes_of, tensor_at, travels_as_bytes
from anydevice.transfer.pinning import PinBudget, pin_resting
from anydevice.transfer.queue import DeviceQueue

__all__ = ["copy_batch", "page_lock"]

#: Tensors share device memory in groups of about so many bytes: it is given back by groups.
_GROUP: Final = 64 << 20


def copy_batch(tensors: Sequence[torch.Tensor], device: Device) -> list[torch.Tensor]:
    """Copy tensors to a device, in few copies that are queued together.

    From the host to a device with streams they travel on a side stream, beside whatever the device
    still computes; the current stream's later work finds them there, and the host does not wait
    (but for memory that is not page-locked, which it must read). All others go one by one.

    Args:
        tensors: on any device; detached. A tensor that comes twice is copied once.
        device: where to; a tensor that is there already is returned itself.

    Returns:
        Tensors on ``device``, each with the strides of its original where that is dense.

    Raises:
        RuntimeError: the device has no memory for them.
    """
    found: dict[int, torch.Tensor] = {}
    queue = _queue(device)
    with torch.inference_mode(False), torch.no_grad():
        together = []
        for tensor in {id(t): t for t in tensors}.values():
            if queue.streams and travels_as_bytes(tensor):
                together.append(tensor)
            else:
                found[id(tensor)] = move_tensor(tensor, device)
        try:
            for group in _groups(together):
                _copy_group(group, queue, found)
        finally:
            # Also when it fails: queued copies still write to memory that is given back now.
            queue.wait(queue.here(), queue.mark(queue.side if together else None))
    return [found[id(tensor)] for tensor in tensors]


def page_lock(tensors: Sequence[torch.Tensor], device: Device) -> None:
    """Page-lock resting tensors, once, so that `copy_batch` need not stop the host for them.

    Where the device does not claim page-locked memory, or too little host memory is free, they stay
    as they are; so do views of files.

    Args:
        tensors: on the host; each keeps its identity, and its data moves.
        device: where they will be copied to.
    """
    backend = registry.get_backend(device.torch)
    if device.is_accelerator and backend.capabilities.pinned_memory:
        pin_resting(tensors, backend, PinBudget(None), mapped=False)


def _queue(device: Device) -> DeviceQueue:
    queue = _queues.get(device)
    if queue is None or not queue.is_current():
        queue = _queues[device] = DeviceQueue(device, 0)
    return queue


#: Devices that something was copied to; each has one side stream for it.
_queues: Final[dict[Device, DeviceQueue]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_queues.clear)


def _copy_group(
    group: list[torch.Tensor], queue: DeviceQueue, found: dict[int, torch.Tensor]
) -> None:
    flat = queue.allocate(sum(align(tensor.nbytes) for tensor in group))
    queue.wait(queue.side, queue.mark(queue.here()))  # the memory's last reader may still be queued
    offset = 0
    with queue.on_side():
        for tensor in group:
            source = bytes_of(tensor, tensor.nbytes, None)
            flat.narrow(0, offset, tensor.nbytes).copy_(source, non_blocking=True)
            found[id(tensor)] = tensor_at(flat, offset, tensor)
            offset += align(tensor.nbytes)


def _groups(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.nbytes > _GROUP:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.nbytes
    if group:
        yield group
