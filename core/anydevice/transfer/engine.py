"""The engine: decides when weights are copied."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.devices import CPU, Device, DeviceLike
from anydevice.interrupts import forget_frames
from anydevice.transfer import profile
from anydevice.transfer.device_copy import copies_of_data, make_device_copy
from anydevice.transfer.group import OffloadGroup
from anydevice.transfer.prefetch import Prefetcher
from anydevice.transfer.readahead import page_faults
from anydevice.transfer.residency import Residency
from anydevice.transfer.settings import read_pin_budget, read_prefetch_depth, read_reserve
from anydevice.transfer.swapping import SwappedTensor
from anydevice.transfer.trace import ExecutionTrace, ForwardPass, PassCall

__all__ = ["Engine"]


class Engine:
    """Loads the groups of one model to their devices. May be copied and pickled.

    docs/transfers.md explains how work is ordered without stopping the host.

    Args:
        prefetch_depth: how many groups may be copied ahead of the one that computes; 0 for none.
        reserve: bytes, or such as ``"2GiB"``, that offloaded weights may take on each device, by
            any spelling of the device; None, or a device that is not named: half of what is free
            when the first group is loaded. A group that is needed now may exceed it.
        pin_budget: bytes, or such as ``"16GiB"``, of host memory that may be page-locked for
            offloaded weights; None for half of what is free when it is first needed.

    Raises:
        OptionError: ``prefetch_depth`` is not a whole number from 0 up.
        BudgetError: a size cannot be read.
        UnknownDeviceError: a device of ``reserve`` cannot be read.

    Example:
        >>> from torch import nn
        >>> from anydevice.devices import CPU
        >>> from anydevice.transfer import Engine
        >>> Engine().group("layer", [("", nn.Linear(2, 2))], CPU)
        <OffloadGroup 'layer': 2 tensors for cpu>
    """

    def __init__(
        self,
        *,
        prefetch_depth: int = 1,
        reserve: Mapping[DeviceLike, int | str] | Mapping[Device, int] | None = None,
        pin_budget: int | str | None = None,
    ) -> None:
        self.prefetch_depth = read_prefetch_depth(prefetch_depth)
        self.reserve = read_reserve(reserve)
        self.pin_budget = read_pin_budget(pin_budget)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        #: Device copies that stand in slots now, by id.
        self.resident: dict[int, Residency] = {}
        self._trace = ExecutionTrace()
        self._passes: dict[int, ForwardPass] = {}
        self._faults = page_faults()
        self._renew_prefetcher()
        _engines.add(self)

    def _renew_prefetcher(self) -> None:
        self._prefetcher = Prefetcher(self.reserve or {}, self.pin_budget)
        self._closer = weakref.finalize(self, self._prefetcher.close, wait=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has only its settings."""
        return {n: getattr(self, n) for n in ("prefetch_depth", "reserve", "pin_budget")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def group(
        self,
        name: str,
        modules: Sequence[tuple[str, nn.Module]],
        device: Device,
        *,
        compute_dtype: torch.dtype | None = None,
        offload_device: Device | None = None,
    ) -> OffloadGroup:
        """Make a group: weights that are copied together. Make them in the order of execution.

        Args:
            name: of the module, for messages.
            modules: names and modules whose own weights, not their children's, are in the group.
            device: where they are needed.
            compute_dtype: of floating-point weights there; None for their own.
            offload_device: where they are in between. With ``cpu``, views of a file may be
                page-locked in memory; with ``disk`` or None they stay in their file.
        """
        return OffloadGroup(self, name, modules, device, compute_dtype, offload_device == CPU)

    def whole_pass(self) -> PassCall:
        """A call of the whole model; see `PassCall`."""
        return PassCall(self)

    def settle(self) -> None:
        """Wait until no queued copy reads offloaded weights, before they are written in place."""
        with self._lock:
            self._prefetcher.settle()

    def close(self) -> None:
        """Wait for readers; drop buffers and threads. The engine may be used again."""
        with self._lock:
            self._closer.detach()
            self._prefetcher.close(wait=True)
            self._renew_prefetcher()

    def add(self, group: OffloadGroup) -> None:
        """Register a new group."""
        self._trace.add(group)

    def enter(self, group: OffloadGroup, held: list[Residency]) -> None:
        """Load a group's weights; ``held`` gets each residency before anything is done for it."""
        gradients = torch.is_grad_enabled()
        try:
            # Inference tensors count no versions, and a change is known by its version.
            with self._lock, torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(gradients)
                current = self._step(group)
                self._join(group, held)
                if missing := group.missing(self.resident):
                    group.require_values(missing)
                    self._onload(group, missing, held)
                self._send_ahead(current)
        except Exception as error:
            forget_frames(error)  # an error that is kept must not keep device copies
            raise
        finally:
            torch._C._set_grad_enabled(gradients)

    def leave(self, held: list[Residency]) -> None:
        """End a call. May be called again, where an interrupt came in its middle."""
        gradients = torch.is_grad_enabled()
        try:
            with self._lock, torch._C._InferenceMode(False):
                torch._C._set_grad_enabled(gradients)
                while held:
                    if held[-1].part(id(held)):
                        self._end(held[-1])
                    held.pop()
        finally:
            torch._C._set_grad_enabled(gradients)

    def begin_pass(self, call: PassCall, thread: int) -> None:
        """A call of the whole model begins."""
        with self._lock:
            current = self._pass_of(thread)
            if not current.calls:
                self._finish(current)
            current.calls.append(call)

    def end_pass(self, call: PassCall, thread: int) -> None:
        """A call of the whole model, and those inside it, are over."""
        with self._lock:
            current = self._passes.get(thread)
            if current is not None and call in current.calls:
                if current.calls[0] is call:
                    self._finish(current)
                    self._passes.pop(thread, None)
                del current.calls[current.calls.index(call) :]

    def compute_on_host(self, group: OffloadGroup) -> None:
        """A group computes on the host: read the next ones ahead where files are being read."""
        faults = page_faults()
        with self._lock:
            current = self._step(group)
            if faults != self._faults:
                self._faults = faults
                for following in current.upcoming(max(1, self.prefetch_depth)):
                    self._prefetcher.read_ahead(following)

    # ------------------------------------------------------------------ loading, under the lock

    def _join(self, group: OffloadGroup, held: list[Residency]) -> None:
        """Use the device copies that another call has loaded."""
        if self.resident:
            for tensor in group.tensors():
                residency = self.resident.get(id(tensor))
                if residency is not None and residency not in held:
                    held.append(residency)
                    residency.join(id(held))

    def _onload(
        self,
        group: OffloadGroup,
        missing: list[tuple[str, Any, torch.Tensor]],
        held: list[Residency],
    ) -> None:
        """Put device copies into slots, one for each tensor."""
        originals = list({id(t): t for _, _, t in missing}.values())
        residency = self._prefetcher.claim(group, originals, held)
        residency.compares = group.compares
        residency.expect(group.name)
        copies = self._device_copies(group, originals, residency)
        swapped = [SwappedTensor.of(slot, t, copies[id(t)]) for _, slot, t in missing]
        # First: a call on another thread must not take a copy for a weight that stays.
        residency.copy_ids = [id(copy) for copy in copies.values()]
        self.resident.update(dict.fromkeys(residency.copy_ids, residency))
        residency.swap_in(swapped)
        residency.join(id(held))

    def _device_copies(
        self, group: OffloadGroup, originals: list[torch.Tensor], residency: Residency
    ) -> dict[int, torch.Tensor]:
        """The device copies of tensors, by the tensors' ids."""
        residency.arrive()
        wanted = (group.device, group.compute_dtype)
        copies = copies_of_data(originals, residency.data(originals), *wanted)
        engine = residency.engine
        for i, original in enumerate(originals):
            if i not in copies:
                span = profile.copies_alone(engine.queue, group.name, original)
                make = functools.partial(make_device_copy, original, *wanted)
                copies[i] = self._prefetcher.retry_without_memory(engine, make)
                if span is not None:  # the host has waited for it
                    span.end = span.profile.now()
        return {id(original): copies[i] for i, original in enumerate(originals)}

    def _end(self, residency: Residency) -> None:
        """The last call is over."""
        try:
            residency.end()
        finally:
            if not residency.swapped:
                for copy in residency.copy_ids:
                    if self.resident.get(copy) is residency:
                        del self.resident[copy]

    # ------------------------------------------------------------------ passes, under the lock

    def _pass_of(self, thread: int) -> ForwardPass:
        current = self._passes.get(thread)
        if current is None:
            if len(self._passes) > _MOST_PASSES:  # threads that are gone, most likely
                self._passes.clear()
            current = self._passes[thread] = ForwardPass(self._trace)
        return current

    def _finish(self, current: ForwardPass) -> None:
        current.finish()
        self._prefetcher.cancel(lambda residency: residency.owner == id(current))

    def _step(self, group: OffloadGroup) -> ForwardPass:
        """A group is entered by the calling thread."""
        current = self._pass_of(threading.get_ident())
        if current.step(group):
            self._prefetcher.cancel(lambda r: r.owner == id(current) and r.group_id != id(group))
        return current

    def _send_ahead(self, current: ForwardPass) -> None:
        """Start the next groups."""
        if not self.prefetch_depth:
            return
        upcoming = current.upcoming(self.prefetch_depth)
        wanted = {id(group) for group in upcoming}
        for group in upcoming:
            if not self._prefetcher.send_ahead(group, id(current), wanted, self.resident):
                return

    def _abandon(self) -> None:
        """In the child of a fork: its threads and its device's work are not there."""
        self._lock = threading.RLock()
        self._closer.detach()
        _left_behind.append(self._prefetcher)
        self._passes = {}
        self._renew_prefetcher()


_MOST_PASSES: Final = 64
_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()
#: What a forked child must not free: device memory that belongs to its parent.
_left_behind: Final[list[Prefetcher]] = []


def _after_fork() -> None:
    for engine in list(_engines):
        engine._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
