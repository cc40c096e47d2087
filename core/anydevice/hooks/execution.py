"""Running a module's forward on a device: arguments, current device and alignment."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import nn

from anydevice.devices import Device
from anydevice.hooks.code_search import uses_host_operators
from anydevice.hooks.cross_device import Alignment, call_aligned
from anydevice.hooks.current_device import current_device
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.types import Args, Forward, Kwargs
from anydevice.hooks.writeback import SentArguments
from anydevice.nested import all_on_device

__all__ = ["are_there", "execute", "run_on"]

_Tensor = torch.Tensor
_NO_KWARGS: Kwargs = {}


def run_on(device: Device, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
    """Run the forward of a module whose weights are on a device, with its arguments there."""
    sent = None
    alignment = Alignment.ON if uses_host_operators(module) else Alignment.INHERITED
    if not are_there(args, kwargs, device.torch):
        sent = SentArguments(args, kwargs, device, None)
        args, kwargs = sent.args, sent.kwargs
        alignment = Alignment.ON if sent.have_modules else alignment
    output = execute(device, sent, alignment, forward, args, kwargs)
    if type(output) in RESUMABLE:
        step = partial(_step, device, sent, alignment)
        return resume(output, Call(contextlib.nullcontext, step, lambda result: result))
    return output


def execute(
    device: Device | None,
    sent: SentArguments | None,
    alignment: Alignment,
    forward: Forward,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Run a forward, or a step of it, in the context that is this thread's.

    Args:
        device: the current device meanwhile; None leaves it alone.
        sent: arguments that were sent there: changes made to them reach the caller's own.
        alignment: see `Alignment`.
        forward: what to run.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    try:
        with current_device(device):
            return call_aligned(alignment, forward, args, kwargs)
    finally:
        if sent is not None:
            sent.write_back()


def _step(
    device: Device, sent: SentArguments | None, alignment: Alignment, function: Forward, value: Any
) -> Any:
    return execute(device, sent, alignment, function, (value,), {})


def are_there(args: Args, kwargs: Kwargs, target: torch.device | None) -> bool:
    """Whether no argument has to move: a few comparisons, as it is asked at every call."""
    if target is None:
        return True
    for item in args:
        if item.device != target if type(item) is _Tensor else not all_on_device(item, target):
            return False
    return not kwargs or are_there(tuple(kwargs.values()), _NO_KWARGS, target)
