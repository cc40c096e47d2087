"""Running a module's forward on a device: arguments, current device and alignment."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.devices import Device
from anydevice.hooks.code_search import uses_host_operators
from anydevice.hooks.cross_device import Alignment, call_aligned
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.types import Args, Forward, Kwargs
from anydevice.hooks.writeback import SentArguments
from anydevice.nested import all_on_device

__all__ = ["are_there", "execute", "run_on", "step_on"]

_Tensor = torch.Tensor
_NO_KWARGS: Kwargs = {}
_NOTHING = contextlib.nullcontext()


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
        step = partial(step_on, device, sent, alignment)
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
        device: the current device while it runs; None changes nothing.
        sent: arguments that were sent there: changes made to them reach the caller's own.
        alignment: see `Alignment`.
        forward: what to run.
        args: positional arguments.
        kwargs: keyword arguments.
    """
    try:
        with _current_device(device):
            return call_aligned(alignment, forward, args, kwargs)
    finally:
        if sent is not None:
            sent.write_back()


def _current_device(device: Device | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a device is the current one of its type.

    A kernel that is not torch's own (Triton's, a vendor's) is launched on the thread's current
    device, and a bare ``"foo"`` means that one. None, the host, and the only device of its type
    change nothing.
    """
    if device is None or device.index is None or not device.is_accelerator:
        return _NOTHING
    backend = registry.get_backend(device.torch)
    before = backend.current_device()
    if before is None or before == device.index:
        return _NOTHING
    return _switched(backend, device.index, before)


@contextlib.contextmanager
def _switched(backend: DeviceBackend, index: int, before: int) -> Iterator[None]:
    try:
        try:
            backend.set_device(index)
            yield
        finally:
            backend.set_device(before)
    finally:  # an interrupt may have cut the first short
        if backend.current_device() != before:
            backend.set_device(before)


def step_on(
    device: Device | None,
    sent: SentArguments | None,
    alignment: Alignment,
    function: Forward,
    value: Any,
) -> Any:
    """Run one step of a forward that runs in steps."""
    return execute(device, sent, alignment, function, (value,), {})


def are_there(args: Args, kwargs: Kwargs, target: torch.device | None) -> bool:
    """Whether no argument has to move: a few comparisons, as it is asked at every call."""
    if target is None:
        return True
    for item in args:
        if item.device != target if type(item) is _Tensor else not all_on_device(item, target):
            return False
    return not kwargs or are_there(tuple(kwargs.values()), _NO_KWARGS, target)
