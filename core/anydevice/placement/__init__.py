"""Placement: which weight goes to which device.

`infer_auto_device_map` plans, `Placement` is the result, and `DeviceMap` is how the other packages
read any device map.
"""

from anydevice.placement.balance import get_balanced_memory
from anydevice.placement.budgets import Headroom, check_budgets, get_max_memory
from anydevice.placement.device_map import DeviceMap, check_device_map, clean_device_map
from anydevice.placement.options import PlacementOptions
from anydevice.placement.placed import Placed, Share
from anydevice.placement.placement import Placement
from anydevice.placement.resolve import (
    STRATEGIES,
    check_form,
    infer_auto_device_map,
    resolve_device_map,
)
from anydevice.placement.resolved import ResolvedPlacement, place_model
from anydevice.placement.splitting import find_blocks

__all__ = [
    "STRATEGIES",
    "DeviceMap",
    "Headroom",
    "Placed",
    "Placement",
    "PlacementOptions",
    "ResolvedPlacement",
    "Share",
    "check_budgets",
    "check_device_map",
    "check_form",
    "clean_device_map",
    "find_blocks",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "place_model",
    "resolve_device_map",
]
