"""Making a device map short."""

from __future__ import annotations

from typing import Any

from anydevice.devices import parse_device

__all__ = ["clean_device_map"]


def clean_device_map(device_map: dict[str, Any], module_name: str = "") -> dict[str, Any]:
    """Put one entry in place of all entries of a module that is on one device, at any depth.

    Args:
        device_map: module or weight names to devices; it is changed.
        module_name: where to begin; the whole model by default.

    Returns:
        The same mapping.

    Example:
        >>> from anydevice.utils import clean_device_map
        >>> clean_device_map({"a.0": 0, "a.1": 0, "b": 1})
        {'b': 1, 'a': 0}
    """
    prefix = f"{module_name}." if module_name else ""
    inside = [name for name in device_map if name.startswith(prefix)]
    devices = [device_map[name] for name in inside]
    if len({parse_device(device) for device in devices}) == 1 and len(inside) > 1:
        for name in inside:
            del device_map[name]
        device_map[module_name] = devices[0]
        return device_map
    depth = prefix.count(".") + 1
    children = dict.fromkeys(".".join(name.split(".")[:depth]) for name in inside)
    for child in children:
        if child and child != module_name and any(n.startswith(f"{child}.") for n in inside):
            clean_device_map(device_map, child)
    return device_map
