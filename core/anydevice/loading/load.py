"""`load_checkpoint_in_model`: find, match, load."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.collector import collector_paused
from anydevice.checkpoint.opening import open_checkpoint
from anydevice.devices import CPU, DISK, Device, DeviceLike
from anydevice.interrupts import uninterrupted
from anydevice.loading.applying import Loading, PrepareRest
from anydevice.loading.casting import Casting
from anydevice.loading.match import Plan, dtypes_once_loaded, make_plan
from anydevice.loading.options import DEFAULT_BUFFER_BYTES, LoadOptions
from anydevice.loading.progress import Progress
from anydevice.loading.report import LoadReport
from anydevice.loading.shards import keep_current_devices
from anydevice.placement import (
    Headroom,
    PlacementOptions,
    ResolvedPlacement,
    check_form,
    place_model,
)
from anydevice.text import require_text
from anydevice.ties import Weight, list_weights, place_weights
from anydevice.weights import Slot, require_module

__all__ = ["LoadRequest", "load_checkpoint_in_model", "load_placed"]


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint,
    device_map: Mapping[str, Any] | str | int | torch.device | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | str | None = None,
    offload_8bit_bnb: bool = False,
    strict: bool = False,
    full_state_dict: bool = True,
    broadcast_from_rank0: bool = False,
    *,
    revision: str | None = None,
    variant: str | None = None,
    token: str | bool | None = None,
    subfolder: str | None = None,
    allow_missing: bool = False,
    preload: bool = False,
    progress: bool = False,
    buffer_bytes: int | str = DEFAULT_BUFFER_BYTES,
    workers: int | None = None,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    headroom: Headroom = None,
    disk: bool | int | str = True,
    fallback_allocation: bool = False,
) -> LoadReport:
    """Load a checkpoint into a model, each weight straight to its device and dtype.

    Afterwards weights of an accelerator are on it; those of ``"cpu"`` and ``"disk"`` are views of
    the checkpoint's files, if they keep the file's dtype. Otherwise those of ``"cpu"`` are in
    memory, and those of ``"disk"`` are written to ``offload_folder`` and are views of that.
    Parameters stay the same objects. The model still needs `anydevice.dispatch_model` to run over
    several devices.

    Args:
        model: on any device, meta too.
        checkpoint: see `open_checkpoint`; or what that returned.
        device_map: module or tensor names to devices, one device for all, or a word such as
            ``"auto"``; None leaves weights on the devices where they are, and puts those on meta on
            the host.
        offload_folder: where weights for the disk are written that are not in a file as needed.
        dtype: what floating-point weights are cast to. None: the model's own dtypes;
            ``"auto"``: the file's. Integers are never cast to it.
        offload_state_dict: accepted for compatibility; memory is bounded without it.
        offload_buffers: whether the buffers of modules on disk are kept there too, or in memory.
        keep_in_fp32_modules: names of modules (or one name) whose weights are kept in float32
            nevertheless.
        offload_8bit_bnb: allow 8-bit weights where the model has floating-point ones.
        strict: raise also for names that only the checkpoint has, and for missing extra state.
        full_state_dict: accepted for compatibility: a `DTensor` takes its own shard of the full
            weight either way, and each process reads no more than that.
        broadcast_from_rank0: only rank 0 of the default process group reads the checkpoint, and
            sends the weights to the others.
        revision: branch, tag or commit of a Hub repository.
        variant: such as ``"fp16"``, for files named so.
        token: for a private Hub repository.
        subfolder: of the folder or repository, where its weights are.
        allow_missing: weights that the checkpoint lacks keep what they hold.
        preload: read the pages of mapped weights now, rather than when they are first used.
        progress: show a progress bar.
        buffer_bytes: host memory, beyond the weights themselves, for what is cast or moved; bytes,
            or a string such as ``"64MiB"``.
        workers: threads that read; by default a few more than there are processors.
        max_memory: budgets, where ``device_map`` is a word; see `infer_auto_device_map`.
        no_split_module_classes: see there, as the next three.
        headroom: see there.
        disk: see there.
        fallback_allocation: see there.

    Raises:
        OptionError: one of the arguments that say how to load cannot be used.
        CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError: as for
            `open_checkpoint`.
        CheckpointMismatchError: names or shapes do not fit; all that is wrong is in the message.
        DeviceMapError, UnknownDeviceError: a weight has no device, or one that is not here.
        ModelError: a device does not support the dtype of a weight.
        OffloadStoreError: weights must be written, and no folder is given (or see `write_store`).
        DoesNotFitError: a device has too little memory. As with all of the above, the model is
            unchanged.
        CheckpointError: reading failed half-way; the message says that the model is half-loaded. Or
            another rank could not load (``broadcast_from_rank0``): all models are as they were.
        MissingRankError: with ``broadcast_from_rank0``, a rank does not call this function within
            the timeout of the process group, or has ended.

    Example:
        >>> from safetensors.torch import save_file
        >>> from torch import nn
        >>> from anydevice import load_checkpoint_in_model
        >>> save_file(nn.Linear(4, 2).state_dict(), "model.safetensors")
        >>> report = load_checkpoint_in_model(nn.Linear(4, 2), "model.safetensors")
        >>> report.missing
        []
    """
    require_module(model)
    request = LoadRequest(
        checkpoint,
        dtype,
        keep_in_fp32_modules,
        offload_8bit_bnb,
        {
            "offload_folder": offload_folder,
            "preload": preload,
            "buffer_bytes": buffer_bytes,
            "workers": workers,
            "strict": strict,
            "allow_missing": allow_missing,
        },
        {"revision": revision, "variant": variant, "token": token, "subfolder": subfolder},
        device_map,
        {
            "max_memory": max_memory,
            "no_split_module_classes": no_split_module_classes,
            "offload_buffers": offload_buffers,
            "headroom": headroom,
            "disk": disk,
            "fallback_allocation": fallback_allocation,
        },
        broadcast_from_rank0=broadcast_from_rank0,
        progress=progress,
    )

    def placed(resolved: ResolvedPlacement) -> None:
        def stored(name: str, slot: Slot) -> Device:
            device = resolved.devices.lookup(name)
            in_memory = slot.is_buffer and not resolved.offload_buffers and device == DISK
            return CPU if in_memory else device

        place_weights(resolved.weights, stored)  # which device runs what, only dispatching decides

    return load_placed(model, request, placed=placed)


@dataclasses.dataclass(frozen=True)
class LoadRequest:
    """What to load and how. It is checked when it is used, on all ranks together.

    Attributes that are not named here are arguments of `load_checkpoint_in_model`.

    Attributes:
        any_kind: ``offload_8bit_bnb`` there.
        how: the arguments of `LoadOptions`.
        finding: ``revision``, ``variant``, ``token`` and ``subfolder``.
        placing: the arguments of `PlacementOptions`, but for dtypes.
        main_device: where offloaded modules run; by default what the placement says.
    """

    checkpoint: str | os.PathLike[str] | Checkpoint
    dtype: str | torch.dtype | None = None
    keep_in_fp32_modules: Collection[str] | str | None = None
    any_kind: bool = False
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finding: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    device_map: Any = None
    placing: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    main_device: DeviceLike | None = None
    broadcast_from_rank0: bool = False
    progress: bool = False

    @functools.cached_property
    def casting(self) -> Casting:
        """The dtypes."""
        return Casting(self.dtype, self.keep_in_fp32_modules, any_kind=self.any_kind)

    def check(self) -> LoadOptions:
        """Check all arguments; return those that say how to load."""
        PlacementOptions(**self.placing)
        if self.device_map is not None:
            check_form(self.device_map)
        _ = self.casting
        require_text(**{name: v for name, v in self.finding.items() if name != "token"})
        return LoadOptions(**self.how)

    def find(self) -> Checkpoint:
        """Open the checkpoint."""
        if isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint.reopened()
        return open_checkpoint(self.checkpoint, **self.finding)

    def place(
        self, model: nn.Module, source: Checkpoint, weights: Sequence[Weight]
    ) -> ResolvedPlacement:
        """Place the weights of a model, with the dtypes that they will have."""
        dtypes = dtypes_once_loaded(weights, source, self.casting)
        options = PlacementOptions(**self.placing, dtype=self.casting.dtype, special_dtypes=dtypes)
        return place_model(model, self.device_map, options, self.main_device, weights)


@torch.inference_mode(False)  # what is made here is to be trained, perhaps
def load_placed(
    model: nn.Module,
    request: LoadRequest,
    *,
    check: Callable[[], object] = lambda: None,
    placed: Callable[[ResolvedPlacement], object] = lambda resolved: None,
    prepare_rest: PrepareRest | None = None,
) -> LoadReport:
    """Open a checkpoint, place the model's weights, and load them there.

    Args:
        model: changed in place.
        request: what and how.
        check: checks what else the caller was given, before the checkpoint is looked for.
        placed: called with the placement, before weights are loaded; not without a device map.
        prepare_rest: see `Loading`.

    Raises:
        CheckpointError, ModelError, DoesNotFitError, OffloadStoreError: see
            `load_checkpoint_in_model`.
    """

    def check_all() -> LoadOptions:
        check()
        return request.check()

    def plan_for(source: Checkpoint) -> Plan:
        weights = list_weights(model)
        if request.device_map is not None:
            placed(request.place(model, source, weights))
        return make_plan(model, source, weights, request.casting)

    with Progress(request.progress) as bar:
        if request.broadcast_from_rank0:
            from anydevice.loading.distributed import load_from_rank0
            from anydevice.loading.ranks import Ranks
            from anydevice.processes.saying import calling_line

            ranks = Ranks(calling_line())

            def share() -> LoadReport:
                return load_from_rank0(
                    model, ranks, check_all, request.find, plan_for, bar, prepare_rest
                )

            return uninterrupted(keep_current_devices(model, share))
        options = check_all()
        source = request.find()

        def load() -> LoadReport:
            with collector_paused():
                return Loading(model, source, plan_for(source), options, bar, prepare_rest).run()

        return uninterrupted(keep_current_devices(model, load))
