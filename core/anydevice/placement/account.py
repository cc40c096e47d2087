"""Counting the bytes of a device map that the user made."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn

from anydevice.devices import CPU, DISK, DeviceLike, parse_device
from anydevice.placement.counting import bytes_by_device
from anydevice.placement.device_map import DeviceMap, require_cover
from anydevice.placement.options import PlacementOptions
from anydevice.placement.placed import Placed, Share
from anydevice.placement.placement import Placement
from anydevice.sizes import dtype_after_load, tensor_bytes
from anydevice.ties import Weight

__all__ = ["account", "recount"]


def account(
    model: nn.Module,
    device_map: Mapping[str, DeviceLike],
    weights: Sequence[Weight],
    options: PlacementOptions,
) -> Placement:
    """Say what a map puts where. It has no budgets, so nothing is reserved either.

    Of the options, ``dtype``, ``special_dtypes`` and ``offload_buffers`` count.

    Raises:
        UnknownDeviceError: a device cannot be read.
        DeviceMapError: the map does not cover the model.
    """
    lookup = DeviceMap(device_map)
    entries = lookup.entries()
    blocks, sizes = _count(model, lookup, weights, options)
    spelled = {name: _spelling(device) for name, device in device_map.items()}
    keys = {str(entries[name]): key for name, key in spelled.items()}
    main = str(lookup.main_device) if lookup.main_device.is_accelerator else None
    used = bytes_by_device(blocks, sizes, main, options.offload_buffers)
    offloads = any(p.device in (CPU.type, DISK.type) for p in blocks)
    return Placement(
        spelled,
        model=type(model).__name__,
        blocks=blocks,
        shares={
            device: Share(keys.get(device, device), None, used[device])
            for device in sorted(used, key=_order)
            if used[device] or device in keys
        },
        main_device=keys.get(main, main) if main is not None and offloads else None,
        offload_buffers=options.offload_buffers,
        sizes=sizes,
        is_given=True,
    )


def recount(
    model: nn.Module, placement: Placement, weights: Sequence[Weight], options: PlacementOptions
) -> Placement:
    """Return a placement with the bytes that a model really has, which it may not be made for.

    Raises:
        DeviceMapError: the placement does not cover the model.
    """
    if not placement.blocks:
        return account(model, dict(placement), weights, options)
    require_cover(
        model, placement.devices, {n: placement.devices.key_of(n) for w in weights for n in w.names}
    )
    blocks_map = {p.name: p.device for p in placement.blocks}
    lookup = DeviceMap(blocks_map)
    if any(lookup.key_of(name) is None for weight in weights for name in weight.names):
        return account(model, dict(placement), weights, options)  # made for another structure
    counted, sizes = _count(model, lookup, weights, options)
    if tuple(sizes) == placement.sizes:
        return placement
    main = next((n for n, s in placement.shares.items() if s.key == placement.main_device), None)
    used = bytes_by_device(counted, sizes, main, placement.offload_buffers)
    shares = {
        device: Share(share.key, share.budget, used.get(device, 0), share.reserve)
        for device, share in placement.shares.items()
    }
    planned = {p.name: p for p in placement.blocks}
    return placement.changed(
        placement,
        model=type(model).__name__,
        blocks=[
            dataclasses.replace(p, tied_to=planned[p.name].tied_to, onload=planned[p.name].onload)
            for p in counted
        ],
        shares=shares,
        sizes=sizes,
    )


def _count(
    model: nn.Module, lookup: DeviceMap, weights: Sequence[Weight], options: PlacementOptions
) -> tuple[list[Placed], list[int]]:
    """The entries of a map as blocks, and the bytes of each weight."""
    covering = {name: lookup.key_of(name) for weight in weights for name in weight.names}
    require_cover(model, lookup, covering)
    entries = lookup.entries()
    parameters: dict[str, dict[int, None]] = {name: {} for name in entries}
    buffers: dict[str, dict[int, None]] = {name: {} for name in entries}
    sizes: list[int] = []
    for number, weight in enumerate(weights):
        first, tensor = weight.names[0], weight.tensor
        dtype = dtype_after_load(first, tensor, options.dtype, options.special_dtypes)
        sizes.append(tensor_bytes(tensor, dtype))
        for name, slot in zip(weight.names, weight.slots, strict=True):
            key = covering[name]
            assert key is not None
            (buffers if slot.is_buffer else parameters)[key][number] = None
    blocks = []
    for name, device in entries.items():
        own = [t for t in buffers[name] if t not in parameters[name]]
        size = sum(sizes[t] for t in (*parameters[name], *own))
        blocks.append(
            Placed(
                name,
                _kind(model, name),
                size,
                str(device),
                parameters=tuple(parameters[name]),
                buffers=tuple(own),
            )
        )
    return blocks, sizes


def _spelling(device: DeviceLike) -> int | str:
    return device if isinstance(device, (int, str)) else str(device)


def _order(device: str) -> tuple[int, str, int]:
    """Accelerators by type and index, the host, the disk."""
    read = parse_device(device)
    return read.tier, read.type, read.index or 0


def _kind(model: nn.Module, name: str) -> str:
    try:
        return type(model.get_submodule(name)).__name__
    except AttributeError:
        return "tensor"
