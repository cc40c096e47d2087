"""From a model and budgets, or from any form of device map, to a `Placement`."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from torch import nn

from anydevice.devices import CPU, DISK, DeviceLike, parse_device
from anydevice.dtypes import DtypeLike
from anydevice.errors import UnknownDeviceError
from anydevice.placement.account import account, recount
from anydevice.placement.balance import balance
from anydevice.placement.blocks import Inventory, take_inventory
from anydevice.placement.budgets import Budget, Headroom, read_budgets
from anydevice.placement.checks import check_disk, check_dtypes
from anydevice.placement.counting import bytes_by_device
from anydevice.placement.device_map import DeviceMap, grouped
from anydevice.placement.options import PlacementOptions
from anydevice.placement.placed import Placed, Share
from anydevice.placement.placement import Placement
from anydevice.placement.planner import Plan, plan_blocks
from anydevice.placement.rounding import plan_within_memory
from anydevice.placement.tied_groups import onload_bytes
from anydevice.ties import Weight, list_weights
from anydevice.weights import require_module

__all__ = ["STRATEGIES", "check_form", "infer_auto_device_map", "resolve_device_map"]


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
        offload_buffers: buffers of offloaded modules are stored with their parameters; else they
            are stored, and count, on the executing device.
        fallback_allocation: where a block would go to a slower tier, use space that is left on a
            device whose run has ended, though its blocks then no longer follow one another.
        headroom: what to leave to activations and caches on each accelerator: bytes, a share of the
            budget below 1, or a dict of device to either. By default a tenth of what was measured
            (of the host's memory too), and nothing where ``max_memory`` is given.
        disk: False forbids it; a size caps it, as ``max_memory["disk"]`` does.
        prefetch: reserve memory for two offloaded blocks where that takes little, so that the next
            one is copied while one runs; else for one.

    Returns:
        The placement. Its values spell devices as ``max_memory`` does.

    Raises:
        BudgetError: a budget cannot be read, or all are 0, or a device does not say what it has.
        UnknownDeviceError: a device cannot be read, or is named twice.
        DoesNotFitError: the disk is forbidden or capped, and the rest is too small.
        ModelError: a weight has no shape yet.
        UnsupportedDtypeError: a device does not support a weight's dtype.

    Example:
        >>> from torch import nn
        >>> from anydevice import infer_auto_device_map
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> dict(infer_auto_device_map(model, max_memory={"cpu": 100, "disk": "1MiB"}))
        {'0': 'cpu', '1': 'disk'}
    """
    options = PlacementOptions(
        max_memory,
        no_split_module_classes,
        dtype,
        special_dtypes,
        offload_buffers,
        fallback_allocation,
        headroom,
        disk,
        prefetch,
    )
    placement = _planned(model, "sequential", options, clean=clean_result)
    if verbose:
        print(placement.explain())
    return placement


def resolve_device_map(
    model: nn.Module,
    device_map: str | DeviceLike | Mapping[str, DeviceLike],
    options: PlacementOptions | None = None,
    weights: Sequence[Weight] | None = None,
) -> Placement:
    """Read any form of device map.

    Args:
        model: the model.
        device_map: ``"auto"`` or ``"balanced"`` (as evenly as the budgets allow),
            ``"balanced_low_0"`` (with little on the first accelerator), ``"sequential"`` (fill one
            after another), a single device, or a dict. The bytes of a `Placement` are counted
            again, since it may be another model's.
        options: see `infer_auto_device_map`.
        weights: the model's, where the caller has them.

    Raises:
        DeviceMapError: a dict does not cover the model.
        UnknownDeviceError: neither a strategy nor a device.
        BudgetError, DoesNotFitError, ModelError: see `infer_auto_device_map`.

    Example:
        >>> from torch import nn
        >>> from anydevice.placement import resolve_device_map
        >>> resolve_device_map(nn.Linear(4, 4), {"": "cpu"}).bytes_on("cpu")
        80
    """
    options = options or PlacementOptions()
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return _planned(model, device_map, options, clean=True)
    if not isinstance(device_map, Mapping):
        check_form(device_map)
        device_map = {"": device_map}
    weights = list_weights(model) if weights is None else weights
    if isinstance(device_map, Placement):
        return recount(model, device_map, weights, options)
    return account(model, device_map, weights, options)


def check_form(device_map: str | DeviceLike | Mapping[str, DeviceLike]) -> None:
    """Make sure that a device map can be read, before a model or checkpoint is looked at.

    Raises:
        DeviceMapError, UnknownDeviceError: it cannot.
    """
    if isinstance(device_map, Mapping):
        DeviceMap(device_map)
    elif not (isinstance(device_map, str) and device_map in STRATEGIES):
        try:
            parse_device(device_map)
        except UnknownDeviceError as error:
            raise UnknownDeviceError(
                f"device_map={device_map!r} is neither a device nor one of "
                f"{', '.join(map(repr, STRATEGIES))}. {error}"
            ) from None


# ---------------------------------------------------------------------- from a plan


def _planned(
    model: nn.Module, strategy: str, options: PlacementOptions, *, clean: bool
) -> Placement:
    require_module(model)
    budgets = read_budgets(options.max_memory, options.headroom, options.disk)
    accelerators = [b for b in budgets if b.device.is_accelerator and b.size]
    host = next((b for b in budgets if b.device == CPU and b.size), None)
    largest = max((b.size or 0 for b in accelerators or budgets if b.device != DISK), default=None)
    inventory = take_inventory(
        model, options.no_split_module_classes, options.dtype, options.special_dtypes, largest
    )
    capacities = [b.size or 0 for b in accelerators]
    if strategy != "sequential":
        capacities = balance(inventory, capacities, low_zero=strategy == "balanced_low_0")

    def plan_for(capacities: Sequence[int]) -> Plan:
        return _best_plan(model, inventory, capacities, host, options)

    plan = plan_within_memory(
        plan_for,
        capacities,
        () if options.pretended else accelerators,
        measured=options.max_memory is None,
    )
    bins = [
        *(dataclasses.replace(b, size=s) for b, s in zip(accelerators, capacities, strict=True)),
        host or Budget(CPU.type, CPU, 0),
        next((b for b in budgets if b.device == DISK), Budget(DISK.type, DISK, 0)),
    ]
    if plan.offload_buffers and not options.offload_buffers:
        warnings.warn(
            f"the buffers of offloaded modules of {type(model).__name__} do not fit on the device "
            "that runs those; they are stored with their modules, as with offload_buffers=True",
            stacklevel=3,
        )
    placement = _assemble(model, plan, bins, clean)
    check_disk(placement, bins)
    if not options.pretended:
        check_dtypes(plan, bins)
    return placement


def _best_plan(
    model: nn.Module,
    inventory: Inventory,
    accelerators: Sequence[int],
    host: Budget | None,
    options: PlacementOptions,
) -> Plan:
    """Plan with the blocks as found; with layers too where the budgets are small for blocks."""

    def plan(blocks: Inventory, prefetch: bool) -> Plan:
        return plan_blocks(
            blocks,
            accelerators,
            host.size if host is not None else None,
            prefetch=prefetch,
            offload_buffers=options.offload_buffers,
            share=options.fallback_allocation,
        )

    best = plan(inventory, options.prefetch)
    found = options.no_split_module_classes is None
    if not (found and accelerators and best.is_tight):
        return best
    layers = take_inventory(model, None, options.dtype, options.special_dtypes, layers=True)
    if len(layers.blocks) == len(inventory.blocks):
        return best
    other = plan(layers, prefetch=False)
    return other if other.resident > best.resident else best


def _assemble(model: nn.Module, plan: Plan, bins: Sequence[Budget], clean: bool) -> Placement:
    sizes, blocks = plan.inventory.sizes, plan.inventory.blocks
    placed = [
        Placed(
            name=block.name,
            kind=block.kind,
            size=sum([sizes[t] for t in (*block.parameters, *block.buffers)]),
            device=str(bins[d].device),
            tied_to=None if tied is None else blocks[tied].name,
            onload=onload_bytes(block, sizes, plan.offload_buffers),
            parameters=tuple(block.parameters),
            buffers=tuple(block.buffers),
        )
        for block, d, tied in zip(blocks, plan.where, plan.tied, strict=True)
    ]
    keys = {str(b.device): b.key for b in bins}
    main = None if plan.main is None else str(bins[plan.main].device)
    used = bytes_by_device(placed, sizes, main, plan.offload_buffers)
    shares = {
        str(b.device): Share(b.key, b.size, used.get(str(b.device), 0), plan.reserve.get(i, 0))
        for i, b in enumerate(bins)
        if used.get(str(b.device)) or b.size != 0 or plan.reserve.get(i)
    }
    return Placement(
        grouped(placed, keys) if clean else {p.name: keys[p.device] for p in placed},
        model=type(model).__name__,
        blocks=placed,
        shares=shares,
        main_device=None if plan.main is None else bins[plan.main].key,
        ahead=plan.shape.ahead if plan.shape is not None else 0,
        whole=plan.shape is None or plan.shape.whole,
        host_run=[blocks[i].name for i in plan.stay],
        offload_buffers=plan.offload_buffers,
        sizes=sizes,
    )
