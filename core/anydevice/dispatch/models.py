"""`dispatch_model`: weights to their places, hooks where they are needed."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from anydevice.devices import Device, DeviceLike
from anydevice.dispatch.places import Places, put_in_place
from anydevice.hooks import AlignDevicesHook
from anydevice.hooks.base import remove_hooks_of_kind
from anydevice.hooks.cpu_offload import CpuOffload
from anydevice.hooks.grouping import ExecutionPlan, attach_groups
from anydevice.hooks.state import align_hook_of
from anydevice.placement import (
    DeviceMap,
    Placement,
    check_budgets,
    find_blocks,
    resolve_device_map,
)
from anydevice.ties import gather_weights
from anydevice.transfer import Engine, read_prefetch_depth
from anydevice.weights import iter_slots

__all__ = ["dispatch_model", "dispatch_offloaded", "dispatch_placed", "hook_model"]

#: The attribute of a dispatched model that holds its transfer engine.
ENGINE = "_anydevice_engine"


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
) -> nn.Module:
    """Spread a model over devices, the host and the disk, and make it run there.

    Everything that can be checked is checked before a weight moves. Parameters stay the same
    objects: ties, attributes and optimizers that hold them live on. Offloaded weights rest in the
    module as host tensors, in RAM or mapped from a file, so reading, saving, loading and copying
    the model work as ever. `undispatch` undoes it.

    Args:
        model: changed in place.
        device_map: names of modules or tensors to devices in any spelling, ``"disk"`` among them;
            or ``"auto"``, ``"balanced"``, ``"balanced_low_0"``, ``"sequential"``; or one device.
        main_device: where offloaded modules run, and the model's own code; by default the first
            accelerator of the map, else the host.
        state_dict: values for weights that rest on the host; by default they keep theirs.
        offload_dir: where weights bound for the disk are written, unless they are views of a file
            already; or where they have been offloaded to.
        offload_index: weight names to where each is in ``offload_dir``; by default the index there.
        offload_buffers: whether buffers of offloaded modules rest with the parameters; by default
            they stay where the module runs.
        skip_keys: keys of mappings, or names of keyword arguments, that are not moved between
            devices. By default what a transformers model declares.
        preload_module_classes: classes whose modules are brought as a whole before their forward,
            for modules that use weights of their parts without calling these. Seldom needed here.
        force_hooks: attach hooks though all is on one device.
        max_memory: budgets, where ``device_map`` is a word such as ``"auto"``.
        no_split_module_classes: classes of blocks that go to a device, and travel, as a whole;
            found by default.
        prefetch_depth: how many units travel ahead of the one that computes.

    Returns:
        The model, with ``hf_device_map`` set.

    Raises:
        OptionError: ``prefetch_depth`` is not a whole number from 0 up.
        BudgetError: a budget cannot be read, or nothing is given.
        DeviceMapError: the map does not cover the model.
        UnknownDeviceError: a device cannot be read or is not here.
        ModelError: a weight is on meta with no value given, or must be written and no
            ``offload_dir`` is given.
        DoesNotFitError: a device lacks memory.
        OffloadStoreError: the offload folder cannot be used.
    """
    prefetch_depth = read_prefetch_depth(prefetch_depth)
    check_budgets(max_memory)
    placement = resolve_device_map(
        model,
        device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        offload_buffers=offload_buffers,
    )
    return dispatch_placed(
        model,
        placement,
        main_device,
        state_dict,
        offload_dir,
        offload_index,
        offload_buffers=offload_buffers,
        force_hooks=force_hooks,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        no_split=no_split_module_classes,
        prefetch_depth=prefetch_depth,
    )


def dispatch_placed(
    model: nn.Module,
    placement: Placement,
    main_device: DeviceLike | None = None,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_index: Mapping[str, Any] | None = None,
    *,
    offload_buffers: bool = False,
    force_hooks: bool = False,
    **hooking: Any,
) -> nn.Module:
    """`dispatch_model`, for a map that was resolved for this very model.

    Args:
        model: see `dispatch_model`, as the others.
        placement: from `resolve_device_map`.
        main_device: see there.
        state_dict: see there.
        offload_dir: see there.
        offload_index: see there.
        offload_buffers: see there.
        force_hooks: see there.
        **hooking: see `hook_model`.
    """
    places = Places.of(placement, main_device, offload_buffers)
    if state_dict is not None or offload_index is not None or not places.are_kept(model):
        weights = gather_weights(iter_slots(model), places.rest)
        put_in_place(weights, state_dict, offload_dir, offload_index)
    _remove_old_hooks(model)
    if force_hooks or not places.is_single:
        hook_model(model, places, **hooking)
    setattr(model, "hf_device_map", dict(placement))  # noqa: B010 - not an attribute of nn.Module
    setattr(model, "anydevice_placement", placement)  # noqa: B010
    return model


def hook_model(
    model: nn.Module,
    places: Places,
    *,
    skip_keys: str | list[str] | None = None,
    preload: Collection[str] = (),
    no_split: Collection[str] | None = None,
    prefetch_depth: int = 1,
) -> None:
    """Hook a model whose weights are in their places.

    Args:
        model: changed in place.
        places: where its modules run.
        skip_keys: see `dispatch_model`.
        preload: class names; see there.
        no_split: class names; see there.
        prefetch_depth: see there.
    """
    if skip_keys is None:
        skip_keys = getattr(model, "_skip_keys_device_placement", None)
    room = places.room()
    engine = Engine(prefetch_depth=prefetch_depth, reserve=room or None)
    plan = ExecutionPlan(
        execution=places.execution,
        main=places.main,
        blocks=find_blocks(model, no_split),
        preload=preload,
        stored=places.rest,
        limits={device: size // max(1, places.placement.ahead) for device, size in room.items()},
        skip_keys=skip_keys,
        resident_buffers=_resident_buffers(model, places),
    )
    attach_groups(model, plan, engine)
    model.__dict__[ENGINE] = engine


def _remove_old_hooks(model: nn.Module) -> None:
    """Remove the hooks of an earlier dispatch; the user's own stay, and all weights too."""
    for module in model.modules():
        hook = align_hook_of(module)
        if hook is not None:
            hook.resident_buffers = frozenset()  # where they rest has just been decided anew
    remove_hooks_of_kind(model, AlignDevicesHook, CpuOffload)


def _resident_buffers(model: nn.Module, places: Places) -> list[str]:
    """Buffers whose entry of the map is not an accelerator, but whose module runs on one."""
    if places.offload_buffers:
        return []
    entries = DeviceMap(places.placement)
    return [
        name
        for name, slot in iter_slots(model)
        if slot.is_buffer and not entries.lookup(name).is_accelerator
    ]


def dispatch_offloaded(
    model: nn.Module,
    rest: Device,
    execution: Device,
    *,
    state_dict: Mapping[str, torch.Tensor] | None = None,
    offload_dir: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    preload: Collection[str] | None = None,
) -> nn.Module:
    """Let all parameters of a model rest on the host or the disk, and run it on one device.

    Hooks are attached even where nothing has to move, since `has_offloaded_params` must tell.
    """
    places = Places.of(resolve_device_map(model, {"": rest}), execution, offload_buffers)
    weights = gather_weights(iter_slots(model), places.rest)
    put_in_place(weights, state_dict, offload_dir)
    _remove_old_hooks(model)
    hook_model(model, places, preload=preload or ())
    for module in model.modules():
        hook = align_hook_of(module)
        if hook is not None:
            hook.offload = True
    return model
