"""Running a module's forward on a device: arguments, current device and alignment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from anydevice.devices import Device
from anydevice.hooks.code_search import uses_host_operators
from anydevice.hooks.cross_device import with_alignment, without_alignment
from anydevice.hooks.current_device import current_device
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.writeback import SentArguments
from anydevice.nested import all_on_device

__all__ = ["are_there", "execute", "run_on"]


def run_on(
    device: Device,
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a forward whose weights are on a device, with its arguments there.

    Args:
        device: the device.
        module: the module whose forward it is.
        forward: the forward.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    sent, align = None, uses_host_operators(module) or None
    if not are_there(args, kwargs, device.torch):
        sent = SentArguments(args, kwargs, device, None)
        args, kwargs = sent.args, sent.kwargs
        align = align or sent.have_modules or None
    output = execute(device, sent, align, forward, args, kwargs)
    if type(output) in RESUMABLE:
        step = partial(_step, device, sent, align)
        return resume(output, Call(contextlib.nullcontext, step, lambda result: result))
    return output


def execute(
    device: Device | None,
    sent: SentArguments | None,
    align: bool | None,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a forward, or a step of it, in the context that is this thread's.

    Args:
        device: the current device meanwhile; None leaves it alone.
        sent: arguments that were sent there: changes made to them reach the caller's own.
        align: see `AlignDevicesHook`.
        forward: what to run.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    try:
        with current_device(device):
            if align is None:
                return forward(*args, **kwargs)
            return (with_alignment if align else without_alignment)(forward, args, kwargs)
    finally:
        if sent is not None:
            sent.write_back()


def _step(
    device: Device,
    sent: SentArguments | None,
    align: bool | None,
    function: Callable[[Any], Any],
    value: Any,
) -> Any:
    return execute(device, sent, align, function, (value,), {})


def are_there(args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device | None) -> bool:
    """Whether no argument has to move: a few comparisons, as it is asked at every call."""
    if target is None:
        return True
    for item in args:
        if type(item) is torch.Tensor:
            if item.device != target:
                return False
        elif not all_on_device(item, target):
            return False
    for item in kwargs.values():
        if type(item) is torch.Tensor:
            if item.device != target:
                return False
        elif not all_on_device(item, target):
            return False
    return True
