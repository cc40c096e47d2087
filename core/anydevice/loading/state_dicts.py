"""A checkpoint file as a plain dict of tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from anydevice.checkpoint.opening import open_checkpoint
from anydevice.devices import CPU, resolve_device
from anydevice.interrupts import uninterrupted
from anydevice.loading.streaming import Request, stream
from anydevice.placement import DeviceMap
from anydevice.tensors import move_tensor

__all__ = ["load_state_dict"]


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Load a checkpoint as a dict of names to tensors.

    Args:
        checkpoint_file: a file of safetensors or of ``torch.save`` (or anything else that
            `open_checkpoint` takes).
        device_map: module or tensor names to devices. Names that it does not cover, and those for
            ``"disk"``, are on the host as views of the file. None: all are.

    Returns:
        The tensors, in the file's dtypes; entries of a torch file that are no tensors come as they
        are.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError: as for
            `open_checkpoint`.
        UnknownDeviceError: a device is not here.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from anydevice.utils import load_state_dict
        >>> save_file({"x": torch.ones(2)}, "model.safetensors")
        >>> load_state_dict("model.safetensors")
        {'x': tensor([1., 1.])}
    """
    checkpoint = open_checkpoint(checkpoint_file)
    places = DeviceMap(device_map or {})
    for device in places.devices:
        resolve_device(device)
    result: dict[str, Any] = {}
    requests: dict[str, Request] = {}
    for name, info in checkpoint.items():
        device = CPU if places.key_of(name) is None else places.lookup(name)
        if device.is_accelerator and info.offset is not None:
            shape = torch.Size(info.shape)
            requests[name] = Request(info, device, info.dtype, shape)
            result[name] = None  # keeps the file's order
        else:
            result[name] = move_tensor(checkpoint.tensor(name), device)
    uninterrupted(lambda: stream(list(requests.values())))
    for name, request in requests.items():
        result[name] = request.result
    return result | dict(checkpoint.extras)
