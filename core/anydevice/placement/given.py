"""Accounting for a device map that the user made."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import nn

from anydevice.devices import CPU, DISK, DeviceLike, parse_device
from anydevice.placement.maps import DeviceMap, require_cover
from anydevice.placement.result import Placed, Placement, Share
from anydevice.sizes import DtypeLike, dtype_after_load, tensor_bytes
from anydevice.ties import tie_groups

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
        model: on any device, meta too.
        device_map: module or tensor names to devices.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        offload_buffers: whether buffers of offloaded modules rest with their parameters.

    Raises:
        UnknownDeviceError: a device cannot be read.
        DeviceMapError: the map does not cover the model.
    """
    lookup = DeviceMap(device_map)
    places = {key: str(device) for key, device in lookup.entries().items()}
    main = str(lookup.main_device)
    offloads = {str(CPU), str(DISK)} if lookup.main_device.is_accelerator else {str(DISK)}
    entries = dict.fromkeys(device_map, 0)
    devices: dict[str, int] = defaultdict(int)
    groups = tie_groups(model)
    covering = {name: lookup.key_of(name) for group in groups for name, _ in group}
    require_cover(model, lookup, covering)
    for group in groups:
        first, slot = group[0]
        tensor = slot.table[slot.name]
        size = tensor_bytes(tensor, dtype_after_load(first, tensor, dtype, special_dtypes))
        held: dict[str, str] = {}  # the entries that hold it, and where it rests
        for name, slot in group:
            key = covering[name]
            assert key is not None
            stays = slot.is_buffer and not offload_buffers and places[key] in offloads
            held[key] = main if stays else places[key]
        for key in held:
            entries[key] += size
        for device in set(held.values()):
            devices[device] += size
    spelled = {name: _spelling(device) for name, device in device_map.items()}
    keys = {places[name]: key for name, key in spelled.items()}
    visited = None  # where what is offloaded runs
    if lookup.main_device.is_accelerator and not offloads.isdisjoint(places.values()):
        visited = keys.get(main, main)
    return Placement(
        spelled,
        model=type(model).__name__,
        blocks=[
            Placed(name, _kind(model, name), size, places[name]) for name, size in entries.items()
        ],
        shares={
            device: Share(keys.get(device, device), None, devices[device])
            for device in sorted(devices, key=_order)
        },
        main_device=visited,
        offload_buffers=offload_buffers,
    )


def _spelling(device: DeviceLike) -> int | str:
    return device if isinstance(device, (int, str)) else str(device)


def _order(device: str) -> tuple[int, str, int]:
    """Accelerators by type and index, the host, the disk."""
    read = parse_device(device)
    tier = 0 if read.is_accelerator else 1 if read == CPU else 2
    return tier, read.type, read.index or 0


def _kind(model: nn.Module, name: str) -> str:
    try:
        return type(model.get_submodule(name)).__name__
    except AttributeError:
        return "tensor"
