"""Loading a checkpoint into a model: every weight, or none.

Weights that stay on the host or the disk in the file's own dtype are views of the file: nothing is
read. The others are read, cast and moved. The model is changed only when all of them are there, so
a failure leaves it unchanged. The exception are weights for which the model already has memory on
that device: that memory is filled in place, since there may be no room for both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, get_args

import torch
from torch import nn

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.devices import CPU, DISK, synchronize
from anydevice.interrupts import check
from anydevice.loading.converting import convert, source_for_disk
from anydevice.loading.failures import explained
from anydevice.loading.match import Plan, Target
from anydevice.loading.methods import (
    LoadMethod,
    give,
    gradients_of,
    is_view,
    memory_to_fill,
    method_of,
)
from anydevice.loading.options import LoadOptions
from anydevice.loading.progress import Progress, touch
from anydevice.loading.report import LoadReport
from anydevice.loading.requirements import compare_ties, require_loadable
from anydevice.loading.shards import cut
from anydevice.loading.sharing import separate
from anydevice.loading.streaming import Request, stream
from anydevice.offload_store.store import write_store
from anydevice.tensors import move_tensor

__all__ = ["Loading", "PrepareRest"]

PrepareRest: TypeAlias = Callable[[Plan], Callable[[], None]]


class Loading:
    """One call's work: first the values (`prepare`), then the model (`commit`).

    Args:
        model: changed by `commit`.
        checkpoint: an open one.
        plan: how the two match.
        options: how to load.
        bar: shows progress.
        prepare_rest: makes what else the model is to get, before any of it is changed; returns what
            puts that in.

    Raises:
        CheckpointMismatchError, OffloadStoreError: it cannot be done.
    """

    #: Whether names that are tied in the model are compared in the checkpoint.
    compares_ties = True

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Checkpoint,
        plan: Plan,
        options: LoadOptions,
        bar: Progress,
        prepare_rest: PrepareRest | None = None,
    ) -> None:
        self._prepare_rest = prepare_rest
        self._put_rest: Callable[[], None] | None = None
        self.model = model
        self.checkpoint = checkpoint
        self.plan = plan
        self.options = options
        self.bar = bar
        self.values: dict[Target, torch.Tensor] = {}
        #: By the id of a Parameter, its gradient where the Parameter will be.
        self._gradients: dict[int, torch.Tensor] = {}
        #: Put scales, counters and extra states into the model, once the weights have their values.
        self._others: list[Callable[[], object]] = []
        self.touched = False  # whether anything of the model has been changed
        self.report = LoadReport(
            missing=[*plan.missing, *plan.left_on_meta], unexpected=list(plan.unexpected)
        )
        self.by_method: dict[LoadMethod, list[Target]] = {m: [] for m in get_args(LoadMethod)}
        for target in plan.targets:
            self.by_method[method_of(target)].append(target)
        if self.compares_ties:
            compare_ties(plan, checkpoint, options)
        require_loadable(model, checkpoint, plan, options, self.by_method["write"])

    def run(self) -> LoadReport:
        """Get all values, then put them into the model: see `prepare` and `commit`."""
        try:
            self.prepare()
            return self.commit()
        finally:
            self.forget()

    def forget(self) -> None:
        """Let go of the values: an error that is kept must not keep device memory."""
        self.values.clear()
        self._gradients.clear()
        self._others.clear()

    def prepare(self) -> None:
        """Get all values; the model is not changed, but for memory that it has for them.

        Raises:
            DoesNotFitError: a device has too little memory.
            CheckpointError: reading failed.
        """
        by_method = self.by_method
        with explained(self):
            for target in by_method["map"]:
                check()
                self._take(target)
            requests = {
                t: Request(t.info, t.device, t.dtype, t.shape, memory_to_fill(t))
                for t in by_method["stream"]
                if t not in self.values
            }
            fills = {t: r for t, r in requests.items() if r.into is not None}
            self._read({t: r for t, r in requests.items() if r.into is None}, by_method["convert"])
            self.write(by_method["write"], {})
            if self.checkpoint.may_share:
                self._separate()
            if self.options.preload:
                touch([v for t, v in self.values.items() if not t.device.is_accelerator], self.bar)
            self.checkpoint.check()
            self.prepare_others()
            # Filling memory that the model has comes last: all else can fail without harm.
            if fills:
                self._synchronize()
                self.touched = True
                self._read(fills)
                self.checkpoint.check()

    def prepare_others(self) -> None:
        """Make all that the model is to get besides the values of its weights."""
        put, plan = self._others, self.plan
        for target in self.values:
            self._gradients |= gradients_of(target)
        for target in plan.targets:
            if target.scale is not None:
                device = target.device if target.device != DISK else CPU
                put.append(
                    partial(_set_scale, target, move_tensor(self._apart(target.scale), device))
                )
        for slot, device in plan.counters:
            old = slot.get()
            if old is not None and old.is_meta:
                zeros = torch.zeros(old.shape, dtype=old.dtype, device="cpu")
                put.append(partial(slot.put, move_tensor(zeros, device)))
        for module, name in plan.extra_states:
            put.append(partial(module.set_extra_state, self._extra(name)))
        if self._prepare_rest is not None:
            self._put_rest = self._prepare_rest(plan)

    def commit(self) -> LoadReport:
        """Put all values into the model.

        Raises:
            CheckpointError: it failed half-way.
        """
        with explained(self):
            self._place()
            self._synchronize()
            if self._put_rest is not None:
                self._put_rest()
        return self.report

    def _synchronize(self) -> None:
        """Wait for the devices: the caller's thread may use other streams than this one."""
        synchronize({target.device for target in self.plan.targets})

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
        if is_view(target.info):
            self.report.mapped_bytes += target.info.nbytes
        else:
            self.report.read_bytes += target.info.nbytes

    def _read(self, requests: Mapping[Target, Request], converted: Sequence[Target] = ()) -> None:
        """Read what must be read; what is not stored as plain bytes is converted one by one."""
        total = sum(t.info.nbytes for t in (*requests, *converted))
        self.report.read_bytes += total
        self.bar.begin(total, "Loading")
        stream(
            list(requests.values()),
            buffer_bytes=self.options.buffer_bytes,
            workers=self.options.workers,
            advance=self.bar.advance,
        )
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
            if is_view(target.info):
                self.report.mapped_bytes -= target.info.nbytes
                self.report.read_bytes += target.info.nbytes

    def write(self, targets: list[Target], values: Mapping[Target, torch.Tensor]) -> None:
        """Write what is for the disk and not in a file as needed, and map it.

        ``values`` are here already; others are taken from the checkpoint.
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
        self.touched = True
        for target, value in self.values.items():
            give(target, value, self._gradients)
        for put in self._others:
            put()

    def _extra(self, name: str) -> Any:
        if name in self.checkpoint.extras:
            return copy.deepcopy(self.checkpoint.extras[name])
        return self._apart(name)

    def _apart(self, name: str) -> torch.Tensor:
        value = self.checkpoint.tensor(name)
        return value.clone() if self.checkpoint.may_share else value


def _set_scale(target: Target, scale: torch.Tensor) -> None:
    """Quantizers keep the scale of an 8-bit weight in an attribute of the weight."""
    target.old.SCB = scale  # type: ignore[attr-defined]
