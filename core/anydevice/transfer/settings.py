"""The engine's settings: read before anything moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anydevice.devices import Device, same_devices
from anydevice.errors import BudgetError
from anydevice.text import read_bytes, whole_number

__all__ = ["read_pin_budget", "read_prefetch_depth", "read_reserve"]


def read_prefetch_depth(depth: Any) -> int:
    """Read how many groups are copied ahead.

    Raises:
        OptionError: it is not a whole number from 0 up.
    """
    return whole_number("prefetch_depth", depth, 0, "how many groups are copied ahead")


def read_reserve(reserve: Mapping[Any, Any] | None) -> dict[Device, int] | None:
    """Read the bytes reserved for offloaded weights.

    Raises:
        BudgetError: a size cannot be read.
        UnknownDeviceError: a device cannot be read, or is named twice.
    """
    if reserve is None:
        return None
    if not isinstance(reserve, Mapping):
        raise BudgetError(f"reserve is {reserve!r}; it must be a dict of device to size")
    sizes = {key: read_bytes(size, f"reserve[{key!r}]") for key, size in reserve.items()}
    return same_devices(sizes, "reserve")


def read_pin_budget(size: Any) -> int | None:
    """Read how much host memory may be page-locked.

    Raises:
        BudgetError: the size cannot be read.
    """
    return None if size is None else read_bytes(size, "pin_budget")
