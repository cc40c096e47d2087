"""Loading a checkpoint into a model: every weight, or none.

Weights that stay on the host or the disk in the file's own dtype are views of the file: nothing is
read. The others are read, cast and moved. The model is changed only when all of them are there, so
a failure leaves it unchanged. The exception are weights for which the model already has memory on
that device: that memory is filled in place, since there may be no room for both.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from anydevice import registry
from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.mapped import backing_of
from anydevice.devices import CPU, DISK, Device
from anydevice.errors import AnyDeviceError, CheckpointError, DoesNotFitError, OffloadStoreError
from anydevice.interrupts import check
from anydevice.loading.converting import convert, source_for_disk
from anydevice.loading.match import Plan, Target
from anydevice.loading.mismatch import require_match
from anydevice.loading.options import LoadOptions
from anydevice.loading.progress import Progress, touch
from anydevice.loading.shards import cut, put_local
from anydevice.loading.sharing import separate
from anydevice.loading.streaming import Request, stream
from anydevice.loading.ties import broken_ties
from anydevice.offload_store.store import write_store
from anydevice.tensors import PLAIN_TYPES, move_tensor
from anydevice.text import list_some
from anydevice.weights import Slot, exchange

__all__ = ["LoadReport", "Loading", "memory_to_fill"]

#: How a weight gets its value: a view of its file; read through buffers; converted as a whole;
#: written to the offload folder, and a view of that.
LoadMethod: TypeAlias = Literal["map", "stream", "convert", "write"]
_UNINITIALIZED: Final = (nn.UninitializedParameter, nn.UninitializedBuffer)
_log: Final = logging.getLogger("anydevice.loading")


@dataclasses.dataclass
class LoadReport:
    """What loading did.

    Attributes:
        mapped_bytes: that are views of the checkpoint's files.
        read_bytes: that were read, cast or moved.
        written_bytes: that were written to the offload folder.
        missing: names that the model has and the checkpoint lacks; those of buffers that are not
            persistent only where they are left on meta.
        unexpected: names that the checkpoint has and the model lacks.
    """

    mapped_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)


class Loading:
    """One call's work: first the values (`prepare`), then the model (`commit`).

    Raises:
        CheckpointMismatchError, OffloadStoreError: it cannot be done.
    """

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        plan: Plan,
        options: LoadOptions,
        bar: Progress,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.plan = plan
        self.options = options
        self.bar = bar
        self.values: dict[Target, torch.Tensor] = {}
        self.touched = False  # whether anything of the model has been changed
        self.report = LoadReport(
            missing=[*plan.missing, *plan.left_on_meta], unexpected=list(plan.unexpected)
        )
        self.by_method: dict[LoadMethod, list[Target]] = {
            "map": [],
            "stream": [],
            "convert": [],
            "write": [],
        }
        for target in plan.targets:
            self.by_method[_method_of(target)].append(target)
        self._require()

    def _require(self) -> None:
        source, options = self.checkpoint.source, self.options
        self._compare_ties()
        require_match(
            self.plan,
            self.model,
            source,
            strict=options.strict,
            allow_missing=options.allow_missing,
        )
        if self.by_method["write"]:
            _require_folder(options.offload_folder, self.by_method["write"])
        _warn_of_unexpected(self.model, source, self.plan.unexpected)
        if self.plan.left_on_meta:
            names = list_some(self.plan.left_on_meta)
            _log.warning(
                "%s of %s stay on meta: %s has none", names, type(self.model).__name__, source
            )

    def _compare_ties(self) -> None:
        """Say what would be dropped without a word; it is a fault when ``strict``."""
        strict, source = self.options.strict, self.checkpoint.source
        for line in broken_ties(self.plan, self.checkpoint, whole=strict):
            if strict:
                self.plan.mismatched.append(line)
            else:
                _log.warning("%s: %s; those of the latter are taken", source, line)

    def run(self) -> LoadReport:
        """Get all values, then put them into the model: see `prepare` and `commit`."""
        try:
            self.prepare()
            return self.commit()
        finally:
            self.values.clear()  # an error that is kept must not keep device memory

    def prepare(self) -> None:
        """Get all values; the model is not changed, but for memory that it has for them.

        Raises:
            DoesNotFitError: a device has too little memory.
            CheckpointError: reading failed.
        """
        by_method = self.by_method
        with self.explained():
            for target in by_method["map"]:
                check()
                self._take(target)
            requests = {t: _request(t) for t in by_method["stream"] if t not in self.values}
            fills = {t: r for t, r in requests.items() if r.into is not None}
            self._read({t: r for t, r in requests.items() if r.into is None}, by_method["convert"])
            self.write(by_method["write"], {})
            if self.checkpoint.may_share:
                self._separate()
            if self.options.preload:
                touch([v for t, v in self.values.items() if not t.device.is_accelerator], self.bar)
            self.checkpoint.check()
            # Filling memory that the model has comes last: all else can fail without harm.
            if fills:
                self._synchronize()
                self.touched = True
                self._read(fills)
                self.checkpoint.check()

    def commit(self) -> LoadReport:
        """Put all values into the model.

        Raises:
            CheckpointError: it failed half-way.
        """
        with self.explained():
            self._place()
            self._synchronize()
        return self.report

    def _synchronize(self) -> None:
        """Wait for the devices: the caller's thread may use other streams than this one."""
        for device in {t.device for t in self.plan.targets if t.device.is_accelerator}:
            if device.index is not None:
                registry.get_backend(device.type).synchronize(device.index)

    # ------------------------------------------------------------------ values

    def _host(self, target: Target) -> torch.Tensor:
        """The weight on the host in the file's dtype; a view of the file where it can be."""
        value = self.checkpoint.tensor(target.name)
        if target.part is not None:
            value = cut(value, target.part).contiguous()
        return value if value.shape == target.shape else value.view(target.shape)

    def _take(self, target: Target) -> None:
        """A view of the file, as it is."""
        self.values[target] = self._host(target)
        if _is_view(target.info):
            self.report.mapped_bytes += target.info.nbytes
        else:
            self.report.read_bytes += target.info.nbytes

    def _read(self, requests: Mapping[Target, Request], converted: Sequence[Target] = ()) -> None:
        """Read what must be read; what is not stored as plain bytes is converted one by one."""
        total = sum(t.info.nbytes for t in (*requests, *converted))
        self.report.read_bytes += total
        self.bar.begin(total, "Loading")
        self._stream(list(requests.values()))
        for target in converted:
            check()
            self.values[target] = convert(self._host(target), target)
            self.bar.advance(target.info.nbytes)
        for target, request in requests.items():
            assert request.result is not None
            if request.into is None:
                self.values[target] = request.result

    def _separate(self) -> None:
        """See `separate`; what is copied is no view of the file any more."""
        for target in separate(self.values):
            if _is_view(target.info):
                self.report.mapped_bytes -= target.info.nbytes
                self.report.read_bytes += target.info.nbytes

    def _stream(self, requests: list[Request]) -> None:
        stream(
            requests,
            buffer_bytes=self.options.buffer_bytes,
            workers=self.options.workers,
            advance=self.bar.advance,
        )

    def write(self, targets: list[Target], values: Mapping[Target, torch.Tensor]) -> None:
        """Write what is for the disk and not in a file as needed, and map it.

        Args:
            targets: the weights.
            values: those that are here already; others are taken from the checkpoint.
        """
        if not targets:
            return
        assert self.options.offload_folder is not None
        made: set[Target] = set()
        sources = {
            t.name: values[t]
            if t in values
            else source_for_disk(t, partial(self._host, t), self.options, made.add)
            for t in targets
        }
        store = write_store(self.options.offload_folder, sources)
        for target in targets:
            self.values[target] = store[target.name]
            if target in made:
                self.report.read_bytes += target.info.nbytes
            if target in made or target in values:
                self.report.written_bytes += target.shape.numel() * target.dtype.itemsize

    # ------------------------------------------------------------------ the model

    def _place(self) -> None:
        """Put all values into the model; from here on it is changed."""
        states = [(e.module, self._extra(e.name)) for e in self.plan.extra_states]
        scales = [(t, self._scale(t, t.scale)) for t in self.plan.targets if t.scale]
        self.touched = True
        for target, value in self.values.items():
            _give(target, value)
        for target, scale in scales:
            owner: Any = target.old
            owner.SCB = scale
        for slot in self.plan.counters:
            old = slot.get()
            if old is not None and old.is_meta:
                slot.put(torch.zeros(old.shape, dtype=old.dtype, device="cpu"))
        for module, state in states:
            module.set_extra_state(state)

    def _extra(self, name: str) -> Any:
        if name in self.checkpoint.extras:
            return copy.deepcopy(self.checkpoint.extras[name])
        return self._apart(name)

    def _scale(self, target: Target, name: str) -> torch.Tensor:
        return move_tensor(self._apart(name), target.device if target.device != DISK else CPU)

    def _apart(self, name: str) -> torch.Tensor:
        value = self.checkpoint.tensor(name)
        return value.clone() if self.checkpoint.may_share else value

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Let every error say whether the model is as it was; one that stops the program too."""
        try:
            yield
        except Exception as error:
            explained = self.explain(error)
            if explained is error:
                raise
            raise explained from error
        except BaseException as error:
            if self.touched:
                error.args = (*error.args, self._half_loaded())
            raise

    def _half_loaded(self) -> str:
        return (
            f"{type(self.model).__name__} is half-loaded: some of its weights are from "
            f"{self.checkpoint.source} and some are not, since loading failed half-way. Load it "
            "again before it is used."
        )

    def explain(self, error: Exception) -> Exception:
        """The error to raise: whether the model is as it was must be known."""
        device = _device_without_memory(self.plan, error)
        if self.touched:
            reason = f"The reason: {type(error).__name__}: {error}"
            return CheckpointError(f"{self._half_loaded()} {reason}")
        if device is not None and not isinstance(error, AnyDeviceError):
            return DoesNotFitError(
                f"{device} has too little memory for the weights that it should get from "
                f"{self.checkpoint.source}; the model is unchanged. Place less on it, by "
                f"device_map or max_memory. ({error!s:.300})"
            )
        return error


def _is_view(info: TensorInfo) -> bool:
    """Whether it is a view of its file: one at an odd place is copied, see `MappedFile.tensor`."""
    return info.offset is not None and info.offset % info.dtype.itemsize == 0


def _method_of(target: Target) -> LoadMethod:
    in_file = target.info.offset is not None
    if target.device.type == DISK.type:
        return "write" if target.is_cast or not in_file else "map"
    if target.device.is_accelerator or target.is_cast:
        return "stream" if in_file else "convert"
    return "convert" if target.part is not None and not in_file else "map"


def _request(target: Target) -> Request:
    return Request(
        target.name,
        target.info,
        target.device,
        target.dtype,
        target.shape,
        into=memory_to_fill(target),
    )


def memory_to_fill(target: Target) -> torch.Tensor | None:
    """The memory that the model has for a weight, if it can take the new value as it is."""
    old = target.old
    if target.part is not None:
        old = old.to_local()  # type: ignore[attr-defined]
    fits = (
        type(old) in PLAIN_TYPES
        and old.layout is torch.strided
        and not old.is_meta
        and old.device == target.device.torch
        and old.dtype == target.dtype
        and old.shape == target.shape
        and old.is_contiguous()
        and not old.is_inference()
        and backing_of(old) is None  # writing to a view of a file would cost a copy of its pages
    )
    return old.detach() if fits else None


def _give(target: Target, value: torch.Tensor) -> None:
    """Let all slots that hold one tensor hold the value; ties stay."""
    for slot in _one_each(target.slots):
        if target.part is not None:
            put_local(slot.table, slot.name, value)
            continue
        old = slot.table[slot.name]
        if type(old) in _UNINITIALIZED:
            old.materialize(value.shape, dtype=value.dtype)
        exchange(slot, value)


def _one_each(slots: list[Slot]) -> list[Slot]:
    """One slot of each Parameter; all of buffers, which are replaced."""
    if len(slots) == 1:
        return slots
    first: dict[int, Slot] = {}
    for slot in slots:
        first.setdefault(id(slot if slot.is_buffer else slot.get()), slot)
    return list(first.values())


def _device_without_memory(plan: Plan, error: Exception) -> Device | None:
    for device in {t.device for t in plan.targets if t.device.is_accelerator}:
        if registry.get_backend(device.type).is_out_of_memory(error):
            return device
    return None


def _require_folder(folder: str | os.PathLike[str] | None, targets: list[Target]) -> None:
    if folder is not None:
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise OffloadStoreError(f"offload_folder={os.fspath(folder)!r} is not a folder")
        return
    first = targets[0]
    if first.is_cast:
        why = f"cast from {first.info.dtype} to {first.dtype}"
    else:
        why = "not in a file as plain bytes"
    raise OffloadStoreError(
        f"{len(targets)} weights are placed on the disk and must be written first ({first.name} is "
        f"{why}): give offload_folder=, or keep the file's dtype with dtype='auto'"
    )


def _warn_of_unexpected(model: nn.Module, source: str, names: list[str]) -> None:
    """Say once that the checkpoint has more than the model."""
    if names:
        _log.warning("%s has no place for %s of %s", type(model).__name__, list_some(names), source)
