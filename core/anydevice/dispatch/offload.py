"""Whole models off the device, as the reference's shortcuts have it."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import nn

from anydevice.devices import CPU, DISK, Device, DeviceLike, resolve_device
from anydevice.dispatch.models import dispatch_offloaded
from anydevice.hooks import CpuOffload, UserCpuOffloadHook, add_hook_to_module
from anydevice.modules import own_device
from anydevice.weights import require_module

__all__ = ["cpu_offload", "cpu_offload_with_hook", "disk_offload"]


def cpu_offload(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all parameters in host memory, and load each block onto a device for its forward.

    Args:
        model: changed in place.
        execution_device: where it runs; by default the device of its first parameter.
        offload_buffers: whether buffers are kept on the host too.
        state_dict: values for the model's weights; by default they keep theirs.
        preload_module_classes: see `dispatch_model`.

    Returns:
        The model.

    Raises:
        UnknownDeviceError, ModelError, DoesNotFitError: see `dispatch_model`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import cpu_offload
        >>> model = cpu_offload(nn.Linear(4, 2), "cpu")
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    require_module(model)
    return dispatch_offloaded(
        model,
        CPU,
        _executing(model, execution_device),
        state_dict=state_dict,
        offload_buffers=offload_buffers,
        preload=preload_module_classes,
    )


def disk_offload(
    model: nn.Module,
    offload_dir: str | os.PathLike[str],
    execution_device: DeviceLike | None = None,
    offload_buffers: bool = False,
    preload_module_classes: list[str] | None = None,
) -> nn.Module:
    """Keep all parameters in a file, mapped into memory, and load each block onto a device in turn.

    Args:
        model: changed in place.
        offload_dir: where its weights are written, unless they are views of a file already. A
            folder holds the weights of one model.
        execution_device: where it runs; by default the device of its first parameter.
        offload_buffers: whether buffers are kept there too.
        preload_module_classes: see `dispatch_model`.

    Returns:
        The model.

    Raises:
        OffloadStoreError: the folder holds another model's weights, or cannot be written.
        UnknownDeviceError, ModelError, DoesNotFitError: see `dispatch_model`.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import disk_offload
        >>> model = disk_offload(nn.Linear(4, 2), tempfile.mkdtemp(), "cpu")
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    require_module(model)
    return dispatch_offloaded(
        model,
        DISK,
        _executing(model, execution_device),
        offload_dir=offload_dir,
        offload_buffers=offload_buffers,
        preload=preload_module_classes,
    )


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: DeviceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep a model on the host until it runs; then on a device until it is sent back.

    For pipelines that run several models one after another, each perhaps many times.

    Args:
        model: changed in place.
        execution_device: where it runs; by default the first accelerator, else the host.
        prev_module_hook: what this function returned for the model before this one in the pipeline;
            that model is sent to the host just before this one runs.

    Returns:
        The model, and a handle with ``offload()`` and ``remove()``.

    Raises:
        UnknownDeviceError: the device is not here.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import cpu_offload_with_hook
        >>> encoder, hook = cpu_offload_with_hook(nn.Linear(4, 2), "cpu")
        >>> decoder, last = cpu_offload_with_hook(nn.Linear(2, 4), "cpu", prev_module_hook=hook)
        >>> decoder(encoder(torch.ones(1, 4))).shape
        torch.Size([1, 4])
        >>> last.offload()
    """
    require_module(model)
    if execution_device is not None:
        resolve_device(execution_device)
    hook = CpuOffload(execution_device, prev_module_hook)
    add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)


def _executing(model: nn.Module, device: DeviceLike | None) -> Device:
    return own_device(model, buffers=False) if device is None else resolve_device(device)
