"""`dispatch_model`: weights to their devices, hooks where they are needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from anydevice.devices import Device, DeviceLike
from anydevice.dispatch.optimizers import check_optimizers
from anydevice.dispatch.storing import prepare_storing
from anydevice.hooks import AlignDevicesHook
from anydevice.hooks.cpu_offload import CpuOffload
from anydevice.hooks.execution_plan import ExecutionPlan
from anydevice.hooks.grouping import attach_groups
from anydevice.hooks.other_processes import prepare_torch
from anydevice.hooks.registration import remove_matching_hooks
from anydevice.hooks.state import align_hook_of
from anydevice.interrupts import uninterrupted
from anydevice.optimizer_state import move_optimizer_state
from anydevice.placement import (
    Headroom,
    PlacementOptions,
    ResolvedPlacement,
    find_blocks,
    place_model,
)
from anydevice.transfer import Engine, read_prefetch_depth
from anydevice.weights import iter_modules, require_module

__all__ = ["HookOptions", "dispatch_model", "dispatch_offloaded", "hook_placed"]

#: The attribute of a dispatched model that holds its transfer engine.
ENGINE = "_anydevice_engine"


@torch.inference_mode(False)  # weights that are made here are to be trained, perhaps
def dispatch_model(
    model: nn.Module,
    device_map: str | DeviceLike | Mapping[str, DeviceLike],
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    offload_buffers: bool = False,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    *,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | None = None,
    prefetch_depth: int = 1,
    headroom: Headroom = None,
    disk: bool | int | str = True,
    fallback_allocation: bool = False,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
) -> nn.Module:
    """Spread a model over devices, the host and the disk, and make it run there.

    Everything that can be checked is checked before a weight moves. Parameters stay the same
    objects: ties, attributes and optimizers that hold them stay valid. Offloaded weights are host
    tensors in their modules, in RAM or mapped from a file, so reading, saving, loading and copying
    the model work as usual. `undispatch` undoes it.

    Args:
        model: changed in place.
        device_map: names of modules or tensors to devices in any spelling, ``"disk"`` among them;
            or ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``; or one device.
        main_device: where offloaded modules run, and the model's own code; by default the first
            accelerator of the map, else the host.
        state_dict: values for weights that are stored on the host; by default they keep theirs.
        offload_dir: where weights for the disk are written, unless they are views of a file
            already; or where they have been offloaded to.
        offload_index: weight names to where each is in ``offload_dir``; by default the index there.
        offload_buffers: whether buffers of offloaded modules are stored with the parameters; by
            default they stay where the module runs.
        skip_keys: keys of mappings, or names of keyword arguments, that are not moved between
            devices. By default what a transformers model declares.
        preload_module_classes: classes whose modules are loaded as a whole before their forward,
            for modules that use weights of their parts without calling these. Rarely needed.
        force_hooks: attach hooks though all is on one device.
        max_memory: budgets, where ``device_map`` is a word such as ``"auto"``.
        no_split_module_classes: classes of blocks that are placed, and loaded, as a whole;
            found by default.
        prefetch_depth: how many blocks are loaded ahead of the one that computes.
        headroom: memory to leave free, where ``device_map`` is a word: see `infer_auto_device_map`.
        disk: whether weights may be placed on the disk, or how many bytes.
        fallback_allocation: see `infer_auto_device_map`.
        optimizers: optimizers of the model that have state already: it is moved with the
            parameters. The state of others of torch's optimizers is moved before their next step.

    Returns:
        The model, with ``hf_device_map`` and ``anydevice_placement`` set.

    Raises:
        OptionError: ``prefetch_depth`` is not a whole number from 0 up.
        BudgetError: a budget cannot be read, or nothing is given.
        DeviceMapError: the map does not cover the model.
        UnknownDeviceError: a device cannot be read or is not here.
        ModelError: a weight is on meta with no value given, or must be written and no
            ``offload_dir`` is given; or an optimizer is not the model's.
        DoesNotFitError: a device lacks memory.
        OffloadStoreError: the offload folder cannot be used.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import dispatch_model
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> model = dispatch_model(model, {"0": "cpu", "1": "cpu"})
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    require_module(model)
    hooking = HookOptions(
        skip_keys,
        preload_module_classes or (),
        no_split_module_classes,
        prefetch_depth,
        force_hooks,
    )
    placing = PlacementOptions(
        max_memory,
        no_split_module_classes,
        offload_buffers=offload_buffers,
        fallback_allocation=fallback_allocation,
        headroom=headroom,
        disk=disk,
        prefetch=hooking.prefetch_depth > 0,
    )
    checked = check_optimizers(model, optimizers)
    resolved = place_model(model, device_map, placing, main_device)

    def dispatch() -> nn.Module:
        moves = prepare_storing(resolved.weights, state_dict, offload_dir, offload_index)
        moves.commit()
        for optimizer in checked:
            move_optimizer_state(optimizer)
        return hook_placed(model, resolved, hooking)

    return uninterrupted(dispatch)


@dataclasses.dataclass(frozen=True)
class HookOptions:
    """How the modules of a placed model are hooked; see `dispatch_model` for each.

    Raises:
        OptionError: ``prefetch_depth`` is not a whole number from 0 up.
    """

    skip_keys: str | list[str] | None = None
    preload: Collection[str] = ()
    no_split: Collection[str] | str | None = None
    prefetch_depth: int = 1
    force_hooks: bool = False

    def __post_init__(self) -> None:
        read_prefetch_depth(self.prefetch_depth)


def hook_placed(model: nn.Module, resolved: ResolvedPlacement, options: HookOptions) -> nn.Module:
    """Hook a model whose weights are where its placement stores them, in place of older hooks."""
    _remove_old_hooks(model)
    prepare_torch()  # weights on one device without hooks are sent to other processes, too
    if options.force_hooks or not resolved.is_single:
        _hook_model(model, resolved, options)
    placement = resolved.placement
    model.__dict__.update(hf_device_map=dict(placement), anydevice_placement=placement)
    return model


def _hook_model(model: nn.Module, resolved: ResolvedPlacement, options: HookOptions) -> None:
    skip_keys = options.skip_keys
    if skip_keys is None:
        skip_keys = getattr(model, "_skip_keys_device_placement", None)
    reserves = resolved.reserves()
    engine = Engine(prefetch_depth=options.prefetch_depth, reserve=reserves or None)
    ahead = max(1, resolved.placement.ahead)
    # Hooks keep it: it must hold no modules, so that a model is in no reference cycle.
    rules = dataclasses.replace(resolved, weights=())
    plan = ExecutionPlan(
        execution=rules.execution,
        main=resolved.main,
        blocks=find_blocks(model, options.no_split),
        preload=options.preload,
        stored=rules.stored,
        limits={device: size // ahead for device, size in reserves.items()},
        skip_keys=skip_keys,
        resident_buffers=_resident_buffers(resolved),
    )
    attach_groups(model, plan, engine)
    model.__dict__[ENGINE] = engine


def _remove_old_hooks(model: nn.Module) -> None:
    """Remove the hooks of an earlier dispatch; the user's own stay, and all weights too."""
    for _, module in iter_modules(model):
        hook = align_hook_of(module)
        if hook is not None:
            hook.resident_buffers = frozenset()  # just decided again
        remove_matching_hooks(module, lambda h: isinstance(h, (AlignDevicesHook, CpuOffload)))


def _resident_buffers(resolved: ResolvedPlacement) -> list[str]:
    """Buffers whose entry of the map is not an accelerator, but whose module runs on one."""
    if resolved.offload_buffers:
        return []
    return [
        name
        for weight in resolved.weights
        for name, slot in zip(weight.names, weight.slots, strict=True)
        if slot.is_buffer and not resolved.devices.lookup(name).is_accelerator
    ]


@torch.inference_mode(False)
def dispatch_offloaded(
    model: nn.Module,
    device: Device,
    execution: Device,
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    preload: Collection[str] | None = None,
) -> nn.Module:
    """Store all parameters of a model on the host or the disk, and run it on one device.

    Hooks are attached even where nothing has to move, since `has_offloaded_params` must tell.
    """
    placing = PlacementOptions(offload_buffers=offload_buffers)
    resolved = place_model(model, {"": device}, placing, execution)

    def dispatch() -> nn.Module:
        prepare_storing(resolved.weights, state_dict, offload_dir).commit()
        _remove_old_hooks(model)
        _hook_model(model, resolved, HookOptions(preload=preload or ()))
        for _, module in iter_modules(model):
            hook = align_hook_of(module)
            if hook is not None:
                hook.offload = True
        return model

    return uninterrupted(dispatch)
