"""From an empty model and a checkpoint to a model that runs: plan, load, dispatch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint
from anydevice.checkpoint.collector import collector_paused
from anydevice.devices import DeviceLike
from anydevice.dispatch.models import dispatch_placed
from anydevice.dispatch.places import Places
from anydevice.loading import load_checkpoint_in_model
from anydevice.placement import Headroom, check_budgets, resolve_device_map
from anydevice.transfer import read_prefetch_depth
from anydevice.weights import iter_slots

__all__ = ["load_checkpoint_and_dispatch"]


def load_checkpoint_and_dispatch(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint,
    device_map: str | DeviceLike | Mapping[str, DeviceLike] | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: list[str] | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    offload_buffers: bool = False,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool | None = None,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    force_hooks: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    main_device: DeviceLike | None = None,
    keep_in_fp32_modules: list[str] | str | None = None,
    allow_missing: bool = False,
    progress: bool = False,
    headroom: Headroom = None,
    disk: bool | int | str = True,
    prefetch_depth: int = 1,
) -> nn.Module:
    """Load a checkpoint straight into place, and make the model run over its devices.

    Args:
        model: perhaps built in `init_empty_weights`; changed in place.
        checkpoint: a file with the whole state dict, an index ``.json`` of shards, a folder with
            either, a Hub repo id, or what `anydevice.checkpoint.open_checkpoint` returns.
        device_map: see `dispatch_model`. None loads the model where it is, and attaches nothing.
        max_memory: budgets by device, such as ``{0: "10GiB", "cpu": "64GiB"}``; what is free by
            default.
        no_split_module_classes: classes of modules that go to one device as a whole; found by
            default.
        offload_folder: where weights bound for the disk are written that are in no file as needed.
        offload_buffers: whether buffers of offloaded modules rest with the parameters.
        dtype: what floating-point weights are cast to.
        offload_state_dict: accepted for compatibility: weights are loaded in bounded memory in any
            case.
        skip_keys: see `dispatch_model`.
        preload_module_classes: see `dispatch_model`.
        force_hooks: attach hooks though all is on one device.
        strict: raise where keys of the checkpoint and the model differ.
        full_state_dict: see `load_checkpoint_in_model`.
        broadcast_from_rank0: see `load_checkpoint_in_model`.
        main_device: see `dispatch_model`.
        keep_in_fp32_modules: names of modules that stay in float32 whatever ``dtype``.
        allow_missing: let weights that the checkpoint lacks keep their values.
        progress: show a progress bar.
        headroom: memory to leave free for activations and caches: see `infer_auto_device_map`.
        disk: whether weights may be placed on the disk, or how many bytes.
        prefetch_depth: see `dispatch_model`.

    Returns:
        The model, with ``hf_device_map`` and ``anydevice_placement`` set.

    Raises:
        CheckpointError: the checkpoint cannot be used; see `load_checkpoint_in_model`.
        OptionError, BudgetError, DeviceMapError, UnknownDeviceError, DoesNotFitError, ModelError:
            see `dispatch_model`.
    """
    prefetch_depth = read_prefetch_depth(prefetch_depth)
    check_budgets(max_memory, headroom, disk)
    placement = None
    if device_map is not None:
        with collector_paused():
            placement = resolve_device_map(
                model,
                device_map,
                max_memory=max_memory,
                no_split_module_classes=no_split_module_classes,
                dtype=dtype,
                special_dtypes=_in_fp32(model, keep_in_fp32_modules),
                offload_buffers=offload_buffers,
                headroom=headroom,
                disk=disk,
                prefetch=prefetch_depth > 0,
            )
        Places.of(placement, main_device, offload_buffers)  # are all devices here?
    load_checkpoint_in_model(
        model,
        checkpoint,
        device_map=placement,
        offload_folder=offload_folder,
        dtype=dtype,
        offload_state_dict=bool(offload_state_dict),
        offload_buffers=offload_buffers,
        keep_in_fp32_modules=keep_in_fp32_modules,
        strict=strict,
        full_state_dict=full_state_dict,
        broadcast_from_rank0=broadcast_from_rank0,
        allow_missing=allow_missing,
        progress=progress,
    )
    if placement is None:
        return model
    return dispatch_placed(
        model,
        placement,
        main_device,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
        force_hooks=force_hooks,
        skip_keys=skip_keys,
        preload=preload_module_classes or (),
        no_split=no_split_module_classes,
        prefetch_depth=prefetch_depth,
    )


def _in_fp32(model: nn.Module, modules: list[str] | str | None) -> dict[str, torch.dtype]:
    """The weights that stay in float32, for the plan's sizes."""
    if not modules:
        return {}
    kept = {modules} if isinstance(modules, str) else set(modules)
    return {
        name: torch.float32
        for name, _ in iter_slots(model)
        if name in kept or not kept.isdisjoint(name.split("."))
    }
