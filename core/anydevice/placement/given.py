"""Accounting for a device map that the user made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping

from torch import nn

from anydevice.devices import CPU, DISK, Device, DeviceLike
from anydevice.modules import iter_slots
from anydevice.placement.maps import DeviceMap
from anydevice.placement.result import Placed, Placement, Share
from anydevice.sizes import DtypeLike, dtype_after_load, tensor_bytes, tie_key

__all__ = ["account"]


def account(
    model: nn.Module,
    device_map: Mapping[str, DeviceLike],
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    offload_buffers: bool = False,
) -> Placement:
    """Say what a map puts where. It has no budgets, so no room is kept either.

    Args:
        model: covered by the map.
        device_map: module or tensor names to devices.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        offload_buffers: whether buffers of offloaded modules rest with their parameters.

    Raises:
        UnknownDeviceError, DeviceMapError: see `DeviceMap`.
    """
    lookup = DeviceMap(device_map)
    offloads = (CPU, DISK) if lookup.main_device.is_accelerator else (DISK,)
    entries: dict[str, dict[Hashable, int]] = {name: {} for name in device_map}
    devices: dict[Device, dict[Hashable, int]] = defaultdict(dict)
    for name, slot in iter_slots(model):
        tensor = slot.get()
        key = lookup.key_of(name)
        if tensor is None or key is None:
            continue
        device = lookup.lookup(key)
        size = tensor_bytes(tensor, dtype_after_load(name, tensor, dtype, special_dtypes))
        entries[key][tie_key(tensor)] = size
        if slot.is_buffer and device in offloads and not offload_buffers:
            device = lookup.main_device
        devices[device][tie_key(tensor)] = size
    spelled = {name: _spelling(device) for name, device in device_map.items()}
    keys = {lookup.lookup(name): key for name, key in spelled.items()}
    offloaded = any(device in offloads for device in lookup.devices)
    main = keys.get(lookup.main_device, str(lookup.main_device))
    return Placement(
        spelled,
        model=type(model).__name__,
        blocks=[
            Placed(name, _kind(model, name), sum(held.values()), str(lookup.lookup(name)))
            for name, held in entries.items()
        ],
        shares={
            str(device): Share(keys.get(device, str(device)), None, sum(held.values()))
            for device, held in sorted(devices.items(), key=lambda pair: _order(pair[0]))
        },
        main_device=main if offloaded and lookup.main_device.is_accelerator else None,
        offload_buffers=offload_buffers,
    )


def _spelling(device: DeviceLike) -> int | str:
    return device if isinstance(device, (int, str)) else str(device)


def _order(device: Device) -> tuple[int, str, int]:
    tier = 0 if device.is_accelerator else 1 if device == CPU else 2
    return tier, device.type, device.index or 0


def _kind(model: nn.Module, name: str) -> str:
    try:
        return type(model.get_submodule(name)).__name__
    except AttributeError:
        return "tensor"
