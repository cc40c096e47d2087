"""Starting copies: what a call needs now, and what the next calls will need."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

import torch

from anydevice.devices import Device
from anydevice.transfer.copy_engine import CopyEngine
from anydevice.transfer.copy_plan import plan_copies, signature
from anydevice.transfer.device_copy import is_transformed
from anydevice.transfer.group import OffloadGroup
from anydevice.transfer.pinning import PinBudget, pin_host_tensors
from anydevice.transfer.readahead import read_ahead
from anydevice.transfer.residency import Residency

__all__ = ["Prefetcher"]


class Prefetcher:
    """The copy engines of a model's devices, and the residencies that were started ahead of time.

    Guarded by its engine's lock. It keeps no reference to a group, so a model that is deleted is
    freed.

    Args:
        reserve: bytes that offloaded weights may take ahead of time, by device.
        pin_budget: bytes of host memory that may be page-locked; None measures.
    """

    def __init__(self, reserve: Mapping[Device, int], pin_budget: int | None) -> None:
        self._reserve = reserve
        self._engines: dict[Device, CopyEngine] = {}
        self._budget = PinBudget(pin_budget)
        #: By the id of the group.
        self._ahead: dict[int, Residency] = {}

    def engine(self, device: Device) -> CopyEngine:
        """The copy engine of a device; a new one where the device's backend was exchanged."""
        engine = self._engines.get(device)
        if engine is not None and not engine.queue.is_current():
            self.cancel(lambda residency: residency.engine is engine)
            engine.close(wait=False)
            engine = None
        if engine is None:
            engine = self._engines[device] = CopyEngine(device, self._reserve.get(device))
        return engine

    # ------------------------------------------------------------------ starting

    def claim(
        self, group: OffloadGroup, originals: list[torch.Tensor], held: list[Residency]
    ) -> Residency:
        """Find what was started ahead for a group, if it is still valid; else start it now.

        Args:
            group: which.
            originals: the tensors that are needed.
            held: where the residency is noted before anything is done for it.

        Raises:
            RuntimeError: the device has no memory for it.
        """
        ahead = self._ahead.get(id(group))
        if ahead is not None:
            if ahead.error is None and ahead.signature == _state(originals):
                held.append(ahead)
                self._ahead.pop(id(group), None)
                return ahead
            ahead.cancel()
            self._ahead.pop(id(group), None)
        engine = self.engine(group.device)
        residency = Residency(engine)
        held.append(residency)
        self.retry_without_memory(
            engine, lambda: self._start(residency, group, originals, ahead=False)
        )
        return residency

    def send_ahead(
        self,
        group: OffloadGroup,
        owner: int,
        wanted: Collection[int],
        resident: Container[int],
    ) -> bool:
        """Start a group before it is needed.

        Args:
            group: which.
            owner: the pass that wants it.
            wanted: ids of groups that the pass wants next: these give no memory up.
            resident: ids of device copies.

        Returns:
            Whether there may be memory for more.
        """
        engine = self.engine(group.device)
        if id(group) in self._ahead or not engine.queue.has_streams:
            return True
        if engine.pool.tight:
            return False
        originals = list({id(t): t for _, _, t in group.missing(resident)}.values())
        if not originals or any(t.is_meta for t in originals):  # the call will raise for these
            return True
        residency = self._ahead[id(group)] = Residency(engine, id(group), owner)
        started = False
        try:
            started = self._start(residency, group, originals, ahead=True) or (
                self.cancel(
                    lambda r: (
                        r.engine is engine
                        and r.owner == owner
                        and r is not residency
                        and r.group_id not in wanted
                    )
                )
                and self._start(residency, group, originals, ahead=True)
            )
        except Exception as error:
            if not engine.queue.backend.is_out_of_memory(error):
                raise
            self._free_memory(engine)
        finally:
            if not started:
                residency.cancel()
                self._ahead.pop(id(group), None)
        return started

    def read_ahead(self, group: OffloadGroup) -> None:
        """Have a group's files read."""
        tensors = group.tensors()
        self.engine(group.device).stager.submit(lambda: read_ahead(tensors))

    def _start(
        self,
        residency: Residency,
        group: OffloadGroup,
        originals: list[torch.Tensor],
        *,
        ahead: bool,
    ) -> bool:
        """Copy what can be copied as bytes; say whether there was memory for it."""
        queue, pool = residency.engine.queue, residency.engine.pool
        if not queue.has_streams or is_transformed():
            return not ahead
        if queue.pins and not group.was_pinned:
            group.was_pinned = True
            pin_host_tensors(originals, queue.backend, self._budget, mapped=group.pins_mapped)
        residency.signature = state = _state(originals)
        if group.plan is None or group.plan[0] != state[0]:
            loose = group.must_be_cast_first(originals, queue.backend.supports_dtype)
            group.plan = (state[0], plan_copies(originals, queue.pins, loose))
        plan = group.plan[1]
        if not plan.pieces:
            return not ahead
        buffer = pool.take(plan.nbytes, padding=plan.padding, ahead=ahead)
        if buffer is None:
            return False
        with torch._C.DisableTorchFunction():  # not for modes of the caller's
            residency.start(originals, plan, buffer, group.name, ahead=ahead)
        return True

    # ------------------------------------------------------------------ giving up

    def retry_without_memory(self, engine: CopyEngine, work: Callable[[], Any]) -> Any:
        """Do something; where the device's memory runs out, free what is not in use and retry.

        Raises:
            RuntimeError: there is no memory for it even so.
        """
        try:
            return work()
        except Exception as error:
            if not engine.queue.backend.is_out_of_memory(error):
                raise
        self._free_memory(engine)
        try:
            return work()
        except Exception as error:
            if engine.pool.kept and engine.queue.backend.is_out_of_memory(error):
                error.args = (f"{error} {_explain(engine.pool.kept)}",)
            raise

    def _free_memory(self, engine: CopyEngine) -> None:
        self.cancel(lambda residency: residency.engine is engine)
        engine.free_memory()

    def cancel(self, which: Callable[[Residency], bool]) -> bool:
        """Give up residencies that no call has claimed; return whether there were any."""
        chosen = [(key, residency) for key, residency in self._ahead.items() if which(residency)]
        for key, residency in chosen:
            residency.cancel()
            self._ahead.pop(key, None)
        return bool(chosen)

    def settle(self) -> None:
        """Wait until no copy reads host memory any more."""
        for residency in self._ahead.values():
            residency.wait_queued()
        for engine in self._engines.values():
            engine.settle()

    def close(self, *, wait: bool) -> None:
        """Give everything up; wait for readers, or let them end."""
        self.cancel(lambda _: True)
        for engine in self._engines.values():
            engine.close(wait=wait)


def _state(originals: list[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
    """What must not have changed between the start of copies and the use of what arrived."""
    versions = tuple(0 if t.is_inference() else t._version for t in originals)
    return tuple(signature(t) for t in originals), versions


def _explain(kept: int) -> str:
    return (
        f"{kept:,} bytes are device copies of offloaded weights whose calls are over: outputs, "
        "caches or a graph for backward hold views of them. Delete these, or run inference under "
        "torch.no_grad()."
    )
