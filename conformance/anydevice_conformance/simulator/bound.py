"""What the simulated device is bound to: its name, and the compiled part that drives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .native import Native

__all__ = ["DeviceName", "bind", "device_type", "index_of", "native"]

_native: Native | None = None
_type = "sim"

DeviceName = int | str | torch.device | None


def bind(device_type: str, native: Native) -> None:
    """Say once which name the device has and what drives it."""
    global _native, _type
    _type, _native = device_type, native


def native() -> Native:
    """The compiled part."""
    if _native is None:
        raise RuntimeError("the simulator is not installed: call simulator.install() first")
    return _native


def index_of(device: DeviceName = None) -> int:
    """The index of a device; of the current one where none is given."""
    if isinstance(device, int):
        return device
    if device is not None:
        parsed = torch.device(device)
        if parsed.type != _type:
            raise ValueError(f"expected a {_type} device, got {parsed}")
        if parsed.index is not None:
            return int(parsed.index)
    return native().current_device()


def device_type() -> str:
    """The name of the device."""
    return _type
