"""A checkpoint into a model: every weight to its place, or none.

Weights that rest on the host or the disk in the file's own dtype are views of the file: nothing is
read. The others are streamed to where they belong. Only when all are there are they put into the
model, so a failure leaves the model as it was; the one exception are weights that fill memory which
the model already has on that device, since there may be no room for both.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import nn

from anydevice import registry
from anydevice.checkpoint.mapped import backing_of
from anydevice.checkpoint.matching import Casting, Plan, Target, make_plan
from anydevice.checkpoint.mismatch import require_match
from anydevice.checkpoint.progress import Progress, touch
from anydevice.checkpoint.reading import Checkpoint, open_checkpoint
from anydevice.checkpoint.store import WeightSource, write_store
from anydevice.checkpoint.streaming import DEFAULT_BUFFER_BYTES, Request, stream
from anydevice.devices import CPU, DISK, Device
from anydevice.errors import AnyDeviceError, CheckpointError, DoesNotFitError, OffloadStoreError
from anydevice.modules import Slot, exchange
from anydevice.tensors import move_tensor

__all__ = ["LoadReport", "load_checkpoint_in_model"]

_log: Final = logging.getLogger("anydevice.checkpoint")


@dataclasses.dataclass
class LoadReport:
    """What loading did.

    Attributes:
        mapped_bytes: that are views of the checkpoint's files.
        read_bytes: that were read, cast or moved.
        written_bytes: that were written to the offload folder.
        missing: names that the model has and the checkpoint lacks.
        unexpected: names that the checkpoint has and the model lacks.
    """

    mapped_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)


def load_checkpoint_in_model(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Checkpoint,
    device_map: Mapping[str, Any] | str | int | torch.device | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    offload_state_dict: bool = False,
    offload_buffers: bool = False,
    keep_in_fp32_modules: Collection[str] | None = None,
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
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    workers: int | None = None,
) -> LoadReport:
    """Load a checkpoint into a model, each weight straight to its device and dtype.

    Afterwards weights of an accelerator are on it; those of ``"cpu"`` and ``"disk"`` rest on the
    host as views of the checkpoint's files, where their dtype is the file's. Otherwise those of
    ``"cpu"`` are in memory, and those of ``"disk"`` are written to ``offload_folder`` and are views
    of that. Parameters stay the same objects. The model still needs `anydevice.dispatch_model` to
    run over several devices.

    Args:
        model: on any device, meta too.
        checkpoint: see `open_checkpoint`; or what that returned.
        device_map: module or tensor names to devices, or one device for all; None leaves weights
            on the devices where they are, and puts those on meta on the host.
        offload_folder: where weights for the disk are written that are not in a file as needed.
        dtype: what floating-point weights are cast to. None: the model's own dtypes;
            ``"auto"``: the file's. Integers are never cast to it.
        offload_state_dict: accepted for compatibility; memory is bounded without it.
        offload_buffers: whether the buffers of modules on disk rest there too, or in memory.
        keep_in_fp32_modules: names of modules whose weights are held in float32 all the same.
        offload_8bit_bnb: let 8-bit weights take the place of floating-point ones.
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
        preload: bring the pages of mapped weights into memory now, rather than when first used.
        progress: show a progress bar.
        buffer_bytes: host memory, beyond the weights themselves, for what is cast or moved.
        workers: threads that read.

    Raises:
        CheckpointNotFoundError, CorruptCheckpointError, UnsafeCheckpointError: as for
            `open_checkpoint`.
        CheckpointMismatchError: names or shapes do not fit; all that is wrong is in the message.
        DeviceMapError, UnknownDeviceError: a weight has no device, or one that is not here.
        ModelError: a device does not support the dtype of a weight.
        OffloadStoreError: weights must be written, and no folder is given (or see `write_store`).
        DoesNotFitError: a device has no room. Like all of the above, it leaves the model as it was.
        CheckpointError: reading failed half-way; the message says that the model is half-loaded.
    """
    casting = Casting(dtype, keep_in_fp32_modules, any_kind=offload_8bit_bnb)
    bar = Progress(progress)
    options = _Options(offload_folder, preload, buffer_bytes, workers)
    if broadcast_from_rank0:
        raise NotImplementedError
    if isinstance(checkpoint, Checkpoint):
        source = checkpoint.reopened()
    else:
        source = open_checkpoint(
            checkpoint, revision=revision, variant=variant, token=token, subfolder=subfolder
        )
    plan = make_plan(model, source, device_map, casting, offload_buffers=offload_buffers)
    require_match(plan, model, source.source, strict=strict, allow_missing=allow_missing)
    if plan.unexpected:
        shown = ", ".join(plan.unexpected[:5])
        more = f" and {len(plan.unexpected) - 5} more" if plan.unexpected[5:] else ""
        _log.warning(
            "%s has no place for %s%s of %s", type(model).__name__, shown, more, source.source
        )
    with bar:
        return _Loading(model, source, plan, options, bar).run()


@dataclasses.dataclass(frozen=True)
class _Options:
    offload_folder: str | os.PathLike[str] | None
    preload: bool
    buffer_bytes: int
    workers: int | None


class _Loading:
    """One call's work: first the values, then the model."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        plan: Plan,
        options: _Options,
        bar: Progress,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.plan = plan
        self.options = options
        self.bar = bar
        self.values: dict[Target, torch.Tensor] = {}
        self.touched = False  # whether anything of the model has been changed
        self.report = LoadReport(missing=list(plan.missing), unexpected=list(plan.unexpected))

    def run(self) -> LoadReport:
        requests: list[tuple[Target, Request]] = []
        to_write: list[Target] = []
        to_convert: list[Target] = []
        for target in self.plan.targets:
            if target.device.is_accelerator or target.is_cast:
                if target.device == DISK:
                    to_write.append(target)
                elif target.info.offset is None:
                    to_convert.append(target)
                else:
                    requests.append((target, self._request(target)))
            elif target.device == DISK and target.info.offset is None:
                to_write.append(target)
            else:
                self._take(target)
        if to_write and self.options.offload_folder is None:
            raise OffloadStoreError(_no_folder(to_write))
        try:
            self._fill(requests, to_convert)
            self._write(to_write)
            if self.options.preload:
                touch([v for t, v in self.values.items() if not t.device.is_accelerator], self.bar)
            self.checkpoint.check()
            self._place()
        except Exception as error:
            raise self._explain(error) from error
        return self.report

    # ------------------------------------------------------------------ values

    def _take(self, target: Target) -> None:
        """A view of the file, as it is."""
        self.values[target] = self.checkpoint.tensor(target.name).view(target.shape)
        if target.info.offset is not None:
            self.report.mapped_bytes += target.info.nbytes
        else:
            self.report.read_bytes += target.info.nbytes

    def _request(self, target: Target) -> Request:
        into = target.old.detach() if _can_fill(target) else None
        return Request(
            target.name, target.info, target.device, target.dtype, target.shape, into=into
        )

    def _fill(self, requests: list[tuple[Target, Request]], others: list[Target]) -> None:
        """Read what must be read; what does not lie in a file as plain bytes is converted alone."""
        total = sum(t.info.nbytes for t, _ in requests) + sum(t.info.nbytes for t in others)
        self.report.read_bytes += total
        self.bar.begin(total, "Loading")
        # Filling memory that the model has comes last: all else can fail without harm.
        for fills in (False, True):
            chosen = [r for _, r in requests if (r.into is not None) == fills]
            if not fills:
                for target in others:
                    self.values[target] = _convert(self.checkpoint.tensor(target.name), target)
                    self.bar.advance(target.info.nbytes)
            self.touched |= fills and bool(chosen)
            stream(
                chosen,
                buffer_bytes=self.options.buffer_bytes,
                workers=self.options.workers,
                advance=self.bar.advance,
            )
        for target, request in requests:
            assert request.result is not None
            if request.into is None:
                self.values[target] = request.result

    def _write(self, targets: list[Target]) -> None:
        """Write what is for the disk and not in a file as needed, and map it."""
        if not targets:
            return
        assert self.options.offload_folder is not None
        sources = {target.name: self._source(target) for target in targets}
        store = write_store(self.options.offload_folder, sources)
        for target in targets:
            self.values[target] = store[target.name]
            self.report.written_bytes += target.shape.numel() * target.dtype.itemsize

    def _source(self, target: Target) -> WeightSource:
        info = target.info
        identity = None
        if info.offset is not None:
            state = os.stat(info.file)
            identity = (
                f"file:{os.path.realpath(info.file)}:{state.st_size}:{state.st_mtime_ns}:"
                f"{info.offset}:{info.dtype}>{target.dtype}"
            )
        return WeightSource(
            target.dtype,
            target.shape,
            lambda: _convert(self.checkpoint.tensor(target.name), target),
            identity,
        )

    # ------------------------------------------------------------------ the model

    def _place(self) -> None:
        """Put all values into the model; from here on it is changed."""
        states = [(e.module, self._extra(e.name)) for e in self.plan.extra_states]
        scales = [(t, self.checkpoint.tensor(t.scale)) for t in self.plan.targets if t.scale]
        self.touched = True
        for target, value in self.values.items():
            _give(target.slots, value)
        for target, scale in scales:
            owner: Any = target.old
            owner.SCB = move_tensor(scale, target.device if target.device != DISK else CPU)
        for slot in self.plan.counters:
            old = slot.get()
            if old is not None and old.is_meta:
                slot.put(torch.zeros(old.shape, dtype=old.dtype, device="cpu"))
        for module, state in states:
            module.set_extra_state(state)

    def _extra(self, name: str) -> Any:
        if name in self.checkpoint.extras:
            return self.checkpoint.extras[name]
        return self.checkpoint.tensor(name)

    def _explain(self, error: Exception) -> Exception:
        """The error to raise: whether the model is as it was must be known."""
        device = _device_without_memory(self.plan, error)
        if self.touched:
            return CheckpointError(
                f"{type(self.model).__name__} is half-loaded: some of its weights are from "
                f"{self.checkpoint.source} and some are not, since loading failed half-way. Load "
                f"it again before it is used. The reason: {type(error).__name__}: {error}"
            )
        if device is not None and not isinstance(error, AnyDeviceError):
            return DoesNotFitError(
                f"{device} has no room for the weights that were to go there from "
                f"{self.checkpoint.source}; the model is unchanged. Place less on it, by "
                f"device_map or max_memory. ({error!s:.300})"
            )
        return error


def _can_fill(target: Target) -> bool:
    """Whether the memory that the model has for a weight can take the new value as it is."""
    old = target.old
    return (
        type(old) in (torch.Tensor, nn.Parameter)
        and old.layout is torch.strided
        and not old.is_meta
        and old.device == target.device.torch
        and old.dtype == target.dtype
        and old.shape == target.shape
        and old.is_contiguous()
        and not old.is_inference()
        and backing_of(old) is None  # writing to a view of a file would cost a copy of its pages
    )


def _convert(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    device = CPU if target.device == DISK else target.device
    if device.is_accelerator:
        backend = registry.get_backend(device.type)
        if tensor.dtype != target.dtype and not backend.supports_dtype(tensor.dtype):
            tensor = tensor.to(target.dtype)
    return move_tensor(tensor.view(target.shape), device).to(target.dtype)


def _give(slots: list[Slot], value: torch.Tensor) -> None:
    """Let all slots that hold one tensor hold the value; ties stay."""
    done: set[int] = set()
    for slot in slots:
        old = slot.table[slot.name]
        if id(old) in done and not slot.is_buffer:
            continue
        done.add(id(old))
        if isinstance(old, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            old.materialize(value.shape, device=torch.device("meta"), dtype=value.dtype)
        exchange(slot, value)


def _device_without_memory(plan: Plan, error: Exception) -> Device | None:
    for device in {t.device for t in plan.targets if t.device.is_accelerator}:
        if registry.get_backend(device.type).is_out_of_memory(error):
            return device
    return None


def _no_folder(targets: list[Target]) -> str:
    first = targets[0]
    if first.is_cast:
        why = f"cast from {first.info.dtype} to {first.dtype}"
    else:
        why = "not in a file as plain bytes"
    return (
        f"{len(targets)} weights are bound for the disk and must be written first ({first.name} is "
        f"{why}): give offload_folder=, or keep the file's dtype with dtype='auto'"
    )
