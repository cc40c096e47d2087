"""From an empty model and a checkpoint to a model that runs: open, place, load, hook."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint
from anydevice.devices import DeviceLike
from anydevice.dispatch.models import HookOptions, hook_placed
from anydevice.dispatch.storing import prepare_storing
from anydevice.loading.load import LoadRequest, load_placed
from anydevice.loading.match import Plan
from anydevice.loading.options import DEFAULT_BUFFER_BYTES
from anydevice.placement import Headroom, ResolvedPlacement
from anydevice.weights import require_module

__all__ = ["load_checkpoint_and_dispatch"]


@torch.inference_mode(False)
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
    fallback_allocation: bool = False,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    preload: bool = False,
    buffer_bytes: int | str = DEFAULT_BUFFER_BYTES,
    workers: int | None = None,
) -> nn.Module:
    """Load a checkpoint straight onto the devices of a placement, and make the model run there.

    Args:
        model: perhaps built in `init_empty_weights`; changed in place.
        checkpoint: a file with the whole state dict, an index ``.json`` of shards, a folder with
            either, a Hub repo id, or what `anydevice.checkpoint.open_checkpoint` returns.
        device_map: see `dispatch_model`. None loads the model where it is, and attaches nothing.
        max_memory: budgets by device, such as ``{0: "10GiB", "cpu": "64GiB"}``; what is free by
            default.
        no_split_module_classes: classes of modules that go to one device as a whole; found by
            default.
        offload_folder: where weights placed on the disk are written, unless a file has them as
            needed.
        offload_buffers: whether buffers of offloaded modules are stored with the parameters.
        dtype: what floating-point weights are cast to; ``"auto"`` keeps the file's.
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
        fallback_allocation: see `infer_auto_device_map`.
        revision: branch, tag or commit of a Hub repository.
        variant: such as ``"fp16"``, for files named so.
        token: for a private Hub repository.
        subfolder: of the folder or repository, where its weights are.
        preload: see `load_checkpoint_in_model`.
        buffer_bytes: see there.
        workers: see there.

    Returns:
        The model, with ``hf_device_map``, ``anydevice_placement`` and ``anydevice_load_report``
        (how many bytes were mapped, read and written) set.

    Raises:
        CheckpointError: the checkpoint cannot be used; see `load_checkpoint_in_model`.
        OptionError, BudgetError, DeviceMapError, UnknownDeviceError, DoesNotFitError, ModelError:
            see `dispatch_model`.

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> from torch import nn
        >>> from anydevice import init_empty_weights, load_checkpoint_and_dispatch
        >>> save_file(nn.Linear(4, 2).state_dict(), "model.safetensors")
        >>> with init_empty_weights():
        ...     model = nn.Linear(4, 2)
        >>> model = load_checkpoint_and_dispatch(model, "model.safetensors", device_map="cpu")
        >>> model(torch.ones(1, 4)).shape
        torch.Size([1, 2])
    """
    require_module(model)
    request = LoadRequest(
        checkpoint,
        dtype,
        keep_in_fp32_modules,
        how={
            "offload_folder": offload_folder,
            "preload": preload,
            "buffer_bytes": buffer_bytes,
            "workers": workers,
            "strict": strict,
            "allow_missing": allow_missing,
        },
        finding={"revision": revision, "variant": variant, "token": token, "subfolder": subfolder},
        device_map=device_map,
        placing={
            "max_memory": max_memory,
            "no_split_module_classes": no_split_module_classes,
            "offload_buffers": offload_buffers,
            "fallback_allocation": fallback_allocation,
            "headroom": headroom,
            "disk": disk,
            "prefetch": prefetch_depth != 0,
        },
        main_device=main_device,
        broadcast_from_rank0=broadcast_from_rank0,
        progress=progress,
    )
    hooking = functools.partial(
        HookOptions,
        skip_keys,
        preload_module_classes or (),
        no_split_module_classes,
        prefetch_depth,
        force_hooks,
    )
    if device_map is None:
        load_placed(model, request, check=hooking)
        return model
    resolved: list[ResolvedPlacement] = []

    def prepare_rest(plan: Plan) -> Callable[[], None]:
        """Move what the checkpoint does not hold, such as some buffers, and hook the model."""
        loaded = {(id(s.module), s.name) for t in plan.targets for s in t.slots}
        # Counters that begin on meta are made where they are to be.
        loaded |= {
            (id(s.module), s.name)
            for s, _ in plan.counters
            if (tensor := s.get()) is not None and tensor.is_meta
        }
        rest = [
            w
            for w in resolved[0].weights
            if not any((id(s.module), s.name) in loaded for s in w.slots)
        ]
        moves = prepare_storing(rest, offload_dir=offload_folder)

        def put() -> None:
            moves.commit()
            hook_placed(model, resolved[0], hooking())

        return put

    report = load_placed(
        model, request, check=hooking, placed=resolved.append, prepare_rest=prepare_rest
    )
    model.__dict__["anydevice_load_report"] = report
    return model
