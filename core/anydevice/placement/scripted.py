"""Scripted and traced modules: TorchScript runs one as a unit, so no map may divide it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from anydevice.devices import Device
from anydevice.errors import DeviceMapError
from anydevice.weights import iter_modules

__all__ = ["is_scripted", "require_undivided"]


def is_scripted(module: nn.Module) -> bool:
    """Whether a module's parts are run by TorchScript, without hooks."""
    return isinstance(module, torch.jit.ScriptModule)


def require_undivided(
    model: nn.Module, execution: Callable[[str], Device | None], prefix: str = ""
) -> None:
    """Make sure that each scripted module runs on one device.

    Args:
        model: the model, or a part of one.
        execution: a module's full name to where it runs; None for one whose parts decide.
        prefix: the full name of ``model``.

    Raises:
        DeviceMapError: one is divided.
    """
    for name, module in iter_modules(model, prefix):
        if not is_scripted(module):
            continue
        places = {execution(part) for part, _ in iter_modules(module, name)}
        if len(places) > 1 or None in places:
            raise DeviceMapError(
                f"{name or type(module).__name__} is a scripted or traced module, which "
                "runs in one piece, but the device map divides it: give it one device"
            )
