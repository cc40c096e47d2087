"""Tensors that move house: they come to rest on another device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from anydevice import registry
from anydevice.devices import Device
from anydevice.tensors import move_tensor
from anydevice.transfer.lane import Lane
from anydevice.transfer.layout import align, bytes_of, tensor_at, travels_as_bytes
from anydevice.transfer.pinning import PinBudget, pin_resting

__all__ = ["carry", "page_lock"]

#: Tensors share device memory in groups of about so many bytes: it is given back by groups.
_GROUP: Final = 64 << 20


def carry(tensors: Sequence[torch.Tensor], device: Device) -> list[torch.Tensor]:
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
    lane = _lane(device)
    with torch.inference_mode(False), torch.no_grad():
        together = []
        for tensor in {id(t): t for t in tensors}.values():
            if lane.streams and travels_as_bytes(tensor):
                together.append(tensor)
            else:
                found[id(tensor)] = move_tensor(tensor, device)
        try:
            for group in _groups(together):
                _carry_group(group, lane, found)
        finally:
            # Also when it fails: queued copies still write to memory that is given back now.
            lane.wait(lane.here(), lane.mark(lane.side if together else None))
    return [found[id(tensor)] for tensor in tensors]


def page_lock(tensors: Sequence[torch.Tensor], device: Device) -> None:
    """Page-lock resting tensors, once, so that `carry` need not stop the host for them.

    Where the device does not claim page-locked memory, or too little host memory is free, they stay
    as they are; so do views of files.

    Args:
        tensors: on the host; each keeps its identity, and its data moves.
        device: where they will be carried to.
    """
    backend = registry.get_backend(device.torch)
    if device.is_accelerator and backend.capabilities.pinned_memory:
        pin_resting(tensors, backend, PinBudget(None), mapped=False)


def _lane(device: Device) -> Lane:
    lane = _lanes.get(device)
    if lane is None or not lane.is_current():
        lane = _lanes[device] = Lane(device, 0)
    return lane


#: Devices that something was carried to; each has one side stream for it.
_lanes: Final[dict[Device, Lane]] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_lanes.clear)


def _carry_group(group: list[torch.Tensor], lane: Lane, found: dict[int, torch.Tensor]) -> None:
    flat = lane.allocate(sum(align(tensor.nbytes) for tensor in group))
    lane.wait(lane.side, lane.mark(lane.here()))  # the memory's last reader may still be queued
    offset = 0
    with lane.on_side():
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
