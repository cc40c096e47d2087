"""What an engine has at run time: devices' queues, and the transfers that are under way.

It knows no group for longer than a call, so that a model which is deleted is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from anydevice.devices import Device
from anydevice.transfer.copy_plan import plan_copies, signature
from anydevice.transfer.device_copy import is_transformed
from anydevice.transfer.pinning import PinBudget, pin_resting
from anydevice.transfer.queue import DeviceQueue
from anydevice.transfer.readahead import read_ahead
from anydevice.transfer.transfer import Transfer

if TYPE_CHECKING:
    from anydevice.transfer.group import OffloadGroup

__all__ = ["Runtime"]


class Runtime:
    """Guarded by its engine's lock.

    Args:
        reserve: bytes that visiting weights may take, by device.
        pin_budget: bytes of host memory that may be page-locked; None measures.
    """

    def __init__(self, reserve: Mapping[Device, int], pin_budget: int | None) -> None:
        self._reserve = reserve
        self._queues: dict[Device, DeviceQueue] = {}
        self._budget = PinBudget(pin_budget)
        #: What travels before it is needed, by the id of its group.
        self._ahead: dict[int, Transfer] = {}

    def queue(self, device: Device) -> DeviceQueue:
        """The queue of a device."""
        queue = self._queues.get(device)
        if queue is not None and not queue.is_current():
            self.cancel(lambda transfer: transfer.queue is queue)
            queue.stager.close(wait=False)
            queue.pool.clear()
            queue = None
        if queue is None:
            queue = self._queues[device] = DeviceQueue(device, self._reserve.get(device))
        return queue

    # ------------------------------------------------------------------ sending

    def claim(
        self, group: OffloadGroup, originals: list[torch.Tensor], owner: int
    ) -> Transfer | None:
        """What was sent ahead for a group, if it is still good; else send it now.

        Returns:
            None where nothing of it travels as bytes.

        Raises:
            RuntimeError: the device has no memory for it.
        """
        ahead = self._ahead.pop(id(group), None)
        if ahead is not None:
            if ahead.error is None and ahead.state == _state(originals):
                return ahead
            ahead.cancel()
        queue = self.queue(group.device)
        try:
            return self._send(queue, group, originals, owner, ahead=False)
        except Exception as error:
            if not queue.lacks_memory(error):
                raise
        self.relieve(queue)
        return self._send(queue, group, originals, owner, ahead=False)

    def send_ahead(self, group: OffloadGroup, owner: int, wanted: Collection[int]) -> bool:
        """Let a group set out before it is needed.

        Args:
            group: which.
            owner: the pass that wants it.
            wanted: ids of groups that the pass wants next: these give no memory up.

        Returns:
            Whether there may be reserve for more.
        """
        queue = self.queue(group.device)
        if id(group) in self._ahead or not queue.streams:
            return True
        if queue.tight:
            return False
        originals = group.missing_tensors()
        if not originals:
            return True
        try:
            transfer = self._send(queue, group, originals, owner, ahead=True)
            if transfer is None and self.cancel(
                lambda s: s.queue is queue and s.owner == owner and s.group not in wanted
            ):
                transfer = self._send(queue, group, originals, owner, ahead=True)
        except Exception as error:
            if not queue.lacks_memory(error):
                raise
            self.relieve(queue)
            return False
        if transfer is not None:
            self._ahead[id(group)] = transfer
        return transfer is not None

    def read_ahead(self, group: OffloadGroup) -> None:
        """Have a group's files read."""
        tensors = group.tensors()
        self.queue(group.device).stager.submit(lambda: read_ahead(tensors))

    def _send(
        self,
        queue: DeviceQueue,
        group: OffloadGroup,
        originals: list[torch.Tensor],
        owner: int,
        *,
        ahead: bool,
    ) -> Transfer | None:
        if not queue.streams or is_transformed():
            return None
        if queue.pins and not group.was_pinned:
            group.was_pinned = True
            group.block = pin_resting(
                originals, queue.backend, self._budget, mapped=group.pins_mapped
            )
        state = _state(originals)
        signatures = state[0]
        if group.plan is None or group.plan[0] != signatures:
            group.plan = (
                signatures,
                plan_copies(originals, group.block, queue.pins, group.loose(originals)),
            )
        plan = group.plan[1]
        if not plan.pieces:
            return None
        buffer = queue.pool.take(plan.nbytes, padding=plan.padding, ahead=ahead)
        if buffer is None:
            return None
        transfer = Transfer(queue, plan, buffer, state, owner, id(group))
        with torch._C.DisableTorchFunction():  # a mode of the caller's has no business here
            try:
                transfer.start(originals, group.block, group.name, ahead=ahead)
            except BaseException:
                transfer.cancel()  # what is queued arrives before the buffer serves others
                raise
        return transfer

    # ------------------------------------------------------------------ taking back

    def cancel(self, which: Callable[[Transfer], bool]) -> bool:
        """Give up transfers that nobody has claimed; say whether there were any."""
        chosen = [key for key, transfer in self._ahead.items() if which(transfer)]
        for key in chosen:
            self._ahead.pop(key).cancel()
        return bool(chosen)

    def relieve(self, queue: DeviceQueue) -> None:
        """A device is out of memory: give back what is not in use, and send nothing ahead."""
        self.cancel(lambda transfer: transfer.queue is queue)
        queue.pool.clear()
        queue.backend.empty_cache(queue.index)
        if not queue.tight:
            queue.tight = True
            warnings.warn(
                f"{queue.device} is out of memory for weights that travel ahead; from now on each "
                "group travels when it is needed. Keep more reserve: a lower max_memory for this "
                "device, or a smaller prefetch_depth.",
                RuntimeWarning,
                stacklevel=2,
            )

    def settle(self) -> None:
        """Wait until nothing that travels reads resting weights."""
        for transfer in self._ahead.values():
            transfer.wait_queued()
        for queue in self._queues.values():
            if queue.streams:
                queue.backend.synchronize_event(queue.mark(queue.side))

    def close(self, *, wait: bool) -> None:
        """Give everything up.

        Args:
            wait: for readers to end; they end soon in any case.
        """
        self.cancel(lambda _: True)
        for queue in self._queues.values():
            queue.stager.close(wait=wait)
            queue.pool.clear()


def _state(originals: list[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
    """What must not have changed between a departure and the use of what has arrived."""
    versions = tuple(0 if t.is_inference() else t._version for t in originals)
    return tuple(signature(t) for t in originals), versions
