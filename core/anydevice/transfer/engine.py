"""The engine: decides when weights move."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.devices import CPU, Device, DeviceLike
from anydevice.transfer.group import OffloadGroup
from anydevice.transfer.readahead import page_faults
from anydevice.transfer.residency import Residency
from anydevice.transfer.runtime import Runtime
from anydevice.transfer.settings import read_pin_budget, read_prefetch_depth, read_reserve
from anydevice.transfer.trace import ExecutionTrace, ForwardPass
from anydevice.transfer.transfer import Transfer

__all__ = ["Engine"]


class Engine:
    """Brings the groups of one model to their devices. May be copied and pickled.

    How work is ordered without stopping the host is told in docs/transfers.md.

    Args:
        prefetch_depth: how many groups may travel ahead of the one that computes; 0 for none.
        reserve: bytes, or such as ``"2GiB"``, kept free on each executing device for offloaded
            weights, by any spelling of the device; None, or a device that is not named: half of
            what is free when the first group is loaded. A group that is needed now may exceed it.
        pin_budget: bytes, or such as ``"16GiB"``, of host memory that may be page-locked for
            resting weights; None for half of what is free when it is first needed.

    Raises:
        OptionError: ``prefetch_depth`` is not a whole number from 0 up.
        BudgetError: a size cannot be read.
        UnknownDeviceError: a device of ``reserve`` cannot be read.
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
        self._standing: dict[int, Residency] = {}
        self._trace = ExecutionTrace()
        self._passes: dict[int, ForwardPass] = {}
        self._faults = page_faults()
        self._renew_runtime()
        _engines.add(self)

    def _renew_runtime(self) -> None:
        self._runtime = Runtime(self.reserve or {}, self.pin_budget)
        self._closer = weakref.finalize(self, self._runtime.close, wait=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its settings alone."""
        return {n: getattr(self, n) for n in ("prefetch_depth", "reserve", "pin_budget")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # ------------------------------------------------------------------ for hooks

    def group(
        self,
        name: str,
        modules: Sequence[tuple[str, nn.Module]],
        device: Device,
        *,
        compute_dtype: torch.dtype | None = None,
        resting: Device | None = None,
    ) -> OffloadGroup:
        """Make a group: weights that travel together. Make them in the order of execution.

        Args:
            name: of the module, for messages.
            modules: full names and modules; the weights that these own, not those of their
                children.
            device: where they are needed.
            compute_dtype: the dtype that floating-point weights have there; None for their own.
            resting: the offload device. With ``cpu``, weights that are views of a file may be
                page-locked in memory too; with ``disk``, or None, they stay in their file.
        """
        return OffloadGroup(self, name, modules, device, compute_dtype, resting == CPU)

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """A call of the whole model, as `begin_pass` and `end_pass`."""
        self.begin_pass()
        try:
            yield
        finally:
            self.end_pass()

    def begin_pass(self) -> None:
        """Say that this thread begins a call of the whole model; calls may be nested.

        Without it the engine guesses. Nothing is brought ahead across the end of a pass, where the
        weights may be changed in ways that nobody can see (``weight.data.mul_(2)``).
        """
        with self._lock:
            current = self._current_pass(threading.get_ident())
            if current.depth == 0:
                self._finish(current)
            current.depth += 1

    def end_pass(self) -> None:
        """Say that the call has ended, also when it failed."""
        thread = threading.get_ident()
        with self._lock:
            current = self._current_pass(thread)
            current.depth -= 1
            if current.depth == 0:
                self._finish(current)
                self._passes.pop(thread, None)

    def settle(self) -> None:
        """Wait until nothing that travels reads resting weights any more.

        For who is about to write to page-locked weights in place, with work of the last forward
        still queued.
        """
        with self._lock:
            self._runtime.settle()

    def close(self) -> None:
        """Wait for what travels; drop buffers and threads. The engine may be used again."""
        with self._lock:
            self._closer.detach()
            self._runtime.close(wait=True)
            self._renew_runtime()

    # ------------------------------------------------------------------ for groups, under the lock

    def _current_pass(self, thread: int) -> ForwardPass:
        current = self._passes.get(thread)
        if current is None:
            if len(self._passes) > _MOST_PASSES:  # threads that are gone, most likely
                self._passes.clear()
            current = self._passes[thread] = ForwardPass(self._trace)
        return current

    def _finish(self, current: ForwardPass) -> None:
        current.finish()
        self._runtime.cancel(lambda transfer: transfer.owner == id(current))

    def _step(self, group: OffloadGroup) -> ForwardPass:
        """A group is entered by the calling thread."""
        current = self._current_pass(threading.get_ident())
        if current.step(group):
            self._runtime.cancel(lambda s: s.owner == id(current) and s.group != id(group))
        return current

    def _prefetch(self, current: ForwardPass) -> None:
        """Let the next groups set out."""
        if not self.prefetch_depth:
            return
        upcoming = current.upcoming(self.prefetch_depth)
        wanted = {id(group) for group in upcoming}
        for group in upcoming:
            if not self._runtime.send_ahead(group, id(current), wanted):
                return

    def _pass_on_host(self, group: OffloadGroup) -> None:
        """A group computes on the host, from weights that are views of files.

        While the disk is being read at all, the next groups are read ahead.
        """
        faults = page_faults()
        with self._lock:
            current = self._step(group)
            if faults != self._faults:
                self._faults = faults
                for following in current.upcoming(max(1, self.prefetch_depth)):
                    self._runtime.read_ahead(following)

    def _claim(self, group: OffloadGroup, originals: list[torch.Tensor]) -> Transfer | None:
        """What travels, or has arrived, for a group; it sets out now where it has not before."""
        return self._runtime.claim(group, originals, id(self._passes.get(threading.get_ident())))

    def _end(self, residency: Residency) -> None:
        """A residency's last call is over."""
        copies = [
            id(swap.copy) for swap in residency.swapped
        ]  # no copy may stay in a variable here
        try:
            residency.end()
        finally:
            for copy in copies:
                self._standing.pop(copy, None)

    def _abandon(self) -> None:
        """In the child of a fork: its threads and its device's work are not there."""
        self._lock = threading.RLock()
        self._closer.detach()
        _left_behind.append(self._runtime)
        self._passes = {}
        self._renew_runtime()


_MOST_PASSES: Final = 64
_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()
#: What a forked child must not free: memory of devices that are its parent's.
_left_behind: Final[list[Runtime]] = []


def _after_fork() -> None:
    for engine in list(_engines):
        engine._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
