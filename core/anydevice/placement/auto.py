"""The front of the room: from a model and budgets, or any form of device map, to a `Placement`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice import registry
from anydevice.devices import CPU, DISK, Device, DeviceLike, parse_device
from anydevice.errors import DoesNotFitError, ModelError, UnknownDeviceError
from anydevice.placement.balance import get_balanced_memory
from anydevice.placement.blocks import Inventory, take_inventory
from anydevice.placement.budgets import Budget, Headroom, read_budgets
from anydevice.placement.bundles import visit_bytes
from anydevice.placement.given import account
from anydevice.placement.maps import check_device_map
from anydevice.placement.planner import Plan, plan_blocks
from anydevice.placement.result import Placed, Placement, Share
from anydevice.sizes import DtypeLike
from anydevice.text import format_bytes

__all__ = ["STRATEGIES", "infer_auto_device_map", "resolve_device_map"]

#: The words that a device map may be.
STRATEGIES: Final = ("auto", "balanced", "balanced_low_0", "sequential")


def infer_auto_device_map(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    verbose: bool = False,
    clean_result: bool = True,
    offload_buffers: bool = False,
    fallback_allocation: bool = False,
    *,
    headroom: Headroom = None,
    disk: bool | int | str = True,
    prefetch: bool = True,
) -> Placement:
    """Plan which device each module goes to: accelerators first, then the host, then the disk.

    Only shapes and dtypes are read, so the model may stand on meta. The laws that the plan keeps
    are in `anydevice.placement.planner`.

    Args:
        model: the model.
        max_memory: budgets by device, such as ``{0: "10GiB", "cpu": "64GiB"}``; devices in any
            spelling, not necessarily of this machine; a device that is not named is not used. By
            default every device of this machine, with what is free now. Not changed.
        no_split_module_classes: names of classes whose modules go to one device as a whole. By
            default they are found: `find_blocks`.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        verbose: print `Placement.explain`.
        clean_result: group modules on one device under their parent's name, ``""`` for all. Else
            every block has its own entry.
        offload_buffers: buffers of offloaded modules rest with their parameters; else they live,
            and count, on the executing device.
        fallback_allocation: where a block would go to a slower tier, use space that is left on a
            device whose run has ended, though its blocks then no longer follow one another.
        headroom: what to leave to activations and caches on each accelerator: bytes, a share of the
            budget below 1, or a dict of device to either. By default a tenth of what was measured
            (of the host's memory too), and nothing where ``max_memory`` is given.
        disk: False forbids it; a size caps it, as ``max_memory["disk"]`` does.
        prefetch: keep room for two visiting blocks, so that the next one can be fetched while one
            runs; where a device is too small for that, room for one.

    Returns:
        The placement. Its values spell devices as ``max_memory`` does.

    Raises:
        BudgetError: a budget cannot be read, or all are 0, or a device does not say what it has.
        UnknownDeviceError: a device cannot be read, or is named twice.
        DoesNotFitError: the disk is forbidden or capped, and the rest is too small.
        ModelError: a weight has a dtype that its device cannot hold, or no shape yet.
    """
    budgets = read_budgets(max_memory, headroom, disk)
    accelerators = [b for b in budgets if b.device.is_accelerator and b.size]
    host = next((b for b in budgets if b.device == CPU and b.size), None)
    largest = max((b.size or 0 for b in accelerators or budgets if b.device != DISK), default=None)
    inventory = take_inventory(model, no_split_module_classes, dtype, special_dtypes, largest)
    plan = plan_blocks(
        inventory,
        [b.size or 0 for b in accelerators],
        host.size if host is not None else None,
        prefetch=prefetch,
        offload_buffers=offload_buffers,
        share=fallback_allocation,
    )
    bins = [
        *accelerators,
        host or Budget(CPU.type, CPU, 0),
        next((b for b in budgets if b.device == DISK), Budget(DISK.type, DISK, 0)),
    ]
    if plan.offload_buffers and not offload_buffers:
        warnings.warn(
            f"the buffers of offloaded modules of {type(model).__name__} do not fit on the device "
            "that runs those; they rest with their modules, as with offload_buffers=True",
            stacklevel=2,
        )
    placement = _assemble(model, inventory, plan, bins, clean_result)
    _check_disk(placement, bins)
    _check_dtypes(inventory, plan, bins)
    if verbose:
        print(placement.explain())
    return placement


def resolve_device_map(
    model: nn.Module,
    device_map: str | DeviceLike | Mapping[str, DeviceLike],
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    offload_buffers: bool = False,
    **options: Any,
) -> Placement:
    """Read any form of device map.

    Args:
        model: the model.
        device_map: ``"auto"`` or ``"balanced"`` (as evenly as the budgets allow),
            ``"balanced_low_0"`` (with little on the first accelerator), ``"sequential"`` (fill one
            after another), a single device, or a dict. A `Placement` is taken as it is.
        max_memory: see `infer_auto_device_map`, as the rest.
        no_split_module_classes: see there.
        dtype: see there.
        special_dtypes: see there.
        offload_buffers: see there.
        **options: ``headroom``, ``disk``, ``prefetch``, ``fallback_allocation``.

    Raises:
        DeviceMapError: a dict does not cover the model.
        UnknownDeviceError: neither a strategy nor a device.
        BudgetError, DoesNotFitError, ModelError: see `infer_auto_device_map`.
    """
    if isinstance(device_map, Mapping):
        if isinstance(device_map, Placement) and device_map.blocks:
            check_device_map(model, device_map)
            return device_map
        return account(model, device_map, dtype, special_dtypes, offload_buffers)
    if not (isinstance(device_map, str) and device_map in STRATEGIES):
        try:
            parse_device(device_map)
        except UnknownDeviceError as error:
            raise UnknownDeviceError(
                f"device_map={device_map!r} is neither a device nor one of "
                f"{', '.join(map(repr, STRATEGIES))}. {error}"
            ) from None
        return account(model, {"": device_map}, dtype, special_dtypes, offload_buffers)
    headroom, disk = options.pop("headroom", None), options.pop("disk", True)
    budgets: Mapping[Any, int | str] = {
        b.key: b.size for b in read_budgets(max_memory, headroom, disk) if b.size is not None
    }
    if device_map != "sequential":
        budgets = get_balanced_memory(
            model,
            budgets,
            no_split_module_classes,
            dtype,
            special_dtypes,
            low_zero=device_map == "balanced_low_0",
        )
    return infer_auto_device_map(
        model,
        budgets,
        no_split_module_classes,
        dtype,
        special_dtypes,
        offload_buffers=offload_buffers,
        disk=disk is not False,
        **options,
    )


# ---------------------------------------------------------------------- from a plan


def _assemble(
    model: nn.Module,
    inventory: Inventory,
    plan: Plan,
    bins: Sequence[Budget],
    clean_result: bool,
) -> Placement:
    sizes, blocks = inventory.sizes, inventory.blocks
    placed = [
        Placed(
            name=block.name,
            kind=block.kind,
            size=sum(sizes[t] for t in (*block.parameters, *block.buffers)),
            device=str(bins[d].device),
            tied_to=None if tied is None else blocks[tied].name,
            visit=visit_bytes(block, sizes, plan.offload_buffers),
        )
        for block, d, tied in zip(blocks, plan.where, plan.tied, strict=True)
    ]
    keys = {str(b.device): b.key for b in bins}
    used = _used(inventory, plan, bins)
    shares = {
        str(b.device): Share(b.key, b.size, used[i], plan.room.get(i, 0))
        for i, b in enumerate(bins)
        if used[i] or b.size != 0 or plan.room.get(i)
    }
    return Placement(
        _device_map(placed, keys, clean_result),
        model=type(model).__name__,
        blocks=placed,
        shares=shares,
        main_device=None if plan.main is None else bins[plan.main].key,
        ahead=plan.shape.ahead if plan.shape is not None else 0,
        whole=plan.shape is None or plan.shape.whole,
        host_run=[blocks[i].name for i in plan.stay],
        offload_buffers=plan.offload_buffers,
    )


def _used(inventory: Inventory, plan: Plan, bins: Sequence[Budget]) -> list[int]:
    """Bytes on each bin. Buffers of offloaded blocks are where those run, unless offloaded too."""
    held: list[set[int]] = [set() for _ in bins]
    host, disk = len(bins) - 2, len(bins) - 1
    executing = plan.main if plan.main is not None else host
    for block, d in zip(inventory.blocks, plan.where, strict=True):
        held[d].update(block.parameters)
        rests = d in (host, disk) and not plan.offload_buffers
        held[executing if rests else d].update(block.buffers)
    return [sum(inventory.sizes[t] for t in tensors) for tensors in held]


def _device_map(
    placed: Sequence[Placed], keys: Mapping[str, int | str], clean: bool
) -> dict[str, int | str]:
    if not clean:
        return {p.name: keys[p.device] for p in placed}
    #: Each prefix's only device; "" (no device's name) where there are several.
    only: dict[str, str] = {}
    for p in placed:
        if p.size:
            for prefix in _prefixes(p.name):
                if only.setdefault(prefix, p.device) != p.device:
                    only[prefix] = ""
    result = {}
    for p in placed:  # what holds nothing goes along with whatever covers it
        name = next((x for x in _prefixes(p.name) if only.get(x, p.device)), p.name)
        result[name] = keys[only.get(name) or p.device]
    return result


def _prefixes(name: str) -> list[str]:
    """``"a.b"`` gives ``["", "a", "a.b"]``."""
    prefixes, end = [""], name.find(".")
    while end != -1:
        prefixes.append(name[:end])
        end = name.find(".", end + 1)
    return [*prefixes, name] if name else prefixes


# ---------------------------------------------------------------------- checks


def _check_disk(placement: Placement, bins: Sequence[Budget]) -> None:
    disk = bins[-1]
    used = placement.bytes_on(DISK)
    if disk.size is None or used <= disk.size:
        return
    said = ", ".join(f"{b.key}: {format_bytes(b.size)}" for b in bins[:-1] if b.size)
    room = sum(placement.room.values())
    kept = f" ({format_bytes(room)} of them for blocks that visit)" if room else ""
    raise DoesNotFitError(
        f"{placement.model} does not fit: {format_bytes(used)} are left over, and the disk "
        + (f"may take {format_bytes(disk.size)}" if disk.size else "is not to be used")
        + f". Budgets: {said}{kept}. Raise one, allow the disk, or pass a smaller dtype."
    )


def _check_dtypes(inventory: Inventory, plan: Plan, bins: Sequence[Budget]) -> None:
    """Every dtype on an accelerator of this machine is one that it can hold."""
    here = {device.type for device in registry.available_devices()}
    asked: dict[tuple[str, object], bool] = {}
    for block, d in zip(inventory.blocks, plan.where, strict=True):
        device = bins[d if plan.main is None or bins[d].device.is_accelerator else plan.main].device
        if not device.is_accelerator or device.type not in here:
            continue
        for tensor in (*block.parameters, *block.buffers):
            dtype = inventory.dtypes[tensor]
            question = (device.type, dtype)
            if question not in asked:
                asked[question] = _supports(device, dtype)
            if not asked[question]:
                raise ModelError(
                    f"{block.name or 'the model'} ({block.kind}) holds {dtype}, which {device} "
                    "cannot. Pass dtype= or special_dtypes=, or leave the device out of max_memory."
                )


def _supports(device: Device, dtype: DtypeLike) -> bool:
    """Types that torch lacks are a quantizer's business."""
    known = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(known, torch.dtype):
        return True
    return registry.get_backend(device.type).supports_dtype(known)
