"""Placement: which weight goes to which device.

`infer_auto_device_map` plans, `Placement` is the answer, `DeviceMap` is how the rest of the house
reads any device map.
"""

from anydevice.placement.auto import STRATEGIES, infer_auto_device_map, resolve_device_map
from anydevice.placement.balance import get_balanced_memory
from anydevice.placement.blocks import find_blocks
from anydevice.placement.budgets import Headroom, check_budgets, get_max_memory
from anydevice.placement.cleaning import clean_device_map
from anydevice.placement.maps import DeviceMap, check_device_map
from anydevice.placement.result import Placed, Placement, Share

__all__ = [
    "STRATEGIES",
    "DeviceMap",
    "Headroom",
    "Placed",
    "Placement",
    "Share",
    "check_budgets",
    "check_device_map",
    "clean_device_map",
    "find_blocks",
    "get_balanced_memory",
    "get_max_memory",
    "infer_auto_device_map",
    "resolve_device_map",
]
