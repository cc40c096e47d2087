"""Weights of hooked modules where they are stored."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from anydevice.devices import CPU, Device, parse_device
from anydevice.hooks.forward import HOOK
from anydevice.relocation import move_weights
from anydevice.ties import gather_weights
from anydevice.weights import Slot, iter_slots

__all__ = ["settle", "store_on_host"]


def settle(module: nn.Module, *_args: Any) -> None:
    """Before values are loaded into page-locked weights: what still reads the old has to end."""
    hook = getattr(module, HOOK, None)
    for part in getattr(hook, "hooks", (hook,)):
        passes = getattr(part, "passes", None)
        if passes is not None:
            passes.settle()


def store_on_host(module: nn.Module, buffers: Collection[str]) -> None:
    """Move buffers to the host; not those that are tied to a tensor that belongs elsewhere."""

    def stored(name: str, slot: Slot) -> Device:
        tensor = slot.get()
        return CPU if name in buffers or tensor is None else parse_device(tensor.device)

    weights = gather_weights(iter_slots(module), stored)
    move_weights([w for w in weights if w.device == CPU and not w.tensor.is_meta])
