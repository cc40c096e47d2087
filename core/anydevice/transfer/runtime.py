"""What an engine has at run time: devices' lanes, and the shipments that are under way.

It knows no unit for longer than a call, so that a model which is deleted is gone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from anydevice.devices import Device
from anydevice.transfer.lane import Lane
from anydevice.transfer.layout import lay_out, signature
from anydevice.transfer.pinning import PinBudget, pin_resting
from anydevice.transfer.reading import read_ahead
from anydevice.transfer.shipment import Shipment
from anydevice.transfer.twins import is_transformed

if TYPE_CHECKING:
    from anydevice.transfer.unit import Unit

__all__ = ["Runtime"]


class Runtime:
    """Guarded by its engine's lock.

    Args:
        room: bytes that visiting weights may take, by device.
        pin_budget: bytes of host memory that may be page-locked; None measures.
    """

    def __init__(self, room: Mapping[Device, int], pin_budget: int | None) -> None:
        self._room = room
        self._lanes: dict[Device, Lane] = {}
        self._budget = PinBudget(pin_budget)
        #: What travels before it is needed, by the id of its unit.
        self._ahead: dict[int, Shipment] = {}

    def lane(self, device: Device) -> Lane:
        """The lane of a device."""
        lane = self._lanes.get(device)
        if lane is not None and not lane.is_current():
            self.cancel(lambda shipment: shipment.lane is lane)
            lane.stager.close(wait=False)
            lane.pool.clear()
            lane = None
        if lane is None:
            lane = self._lanes[device] = Lane(device, self._room.get(device))
        return lane

    # ------------------------------------------------------------------ sending

    def claim(self, unit: Unit, rests: list[torch.Tensor], owner: int) -> Shipment | None:
        """What was sent ahead for a unit, if it is still good; else send it now.

        Returns:
            None where nothing of it travels as bytes.

        Raises:
            RuntimeError: the device has no memory for it.
        """
        ahead = self._ahead.pop(id(unit), None)
        if ahead is not None:
            if ahead.error is None and ahead.state == _state(rests):
                return ahead
            ahead.cancel()
        lane = self.lane(unit.device)
        try:
            return self._send(lane, unit, rests, owner, ahead=False)
        except Exception as error:
            if not lane.lacks_memory(error):
                raise
        self.relieve(lane)
        return self._send(lane, unit, rests, owner, ahead=False)

    def send_ahead(self, unit: Unit, owner: int, wanted: Collection[int]) -> bool:
        """Let a unit set out before it is needed.

        Args:
            unit: which.
            owner: the pass that wants it.
            wanted: ids of units that the pass wants next: these give no memory up.

        Returns:
            Whether there may be room for more.
        """
        lane = self.lane(unit.device)
        if id(unit) in self._ahead or not lane.streams:
            return True
        if lane.tight:
            return False
        rests = unit.missing_tensors()
        if not rests:
            return True
        try:
            shipment = self._send(lane, unit, rests, owner, ahead=True)
            if shipment is None and self.cancel(
                lambda s: s.lane is lane and s.owner == owner and s.unit not in wanted
            ):
                shipment = self._send(lane, unit, rests, owner, ahead=True)
        except Exception as error:
            if not lane.lacks_memory(error):
                raise
            self.relieve(lane)
            return False
        if shipment is not None:
            self._ahead[id(unit)] = shipment
        return shipment is not None

    def read_ahead(self, unit: Unit) -> None:
        """Have a unit's files read."""
        tensors = unit.tensors()
        self.lane(unit.device).stager.submit(lambda: read_ahead(tensors))

    def _send(
        self, lane: Lane, unit: Unit, rests: list[torch.Tensor], owner: int, *, ahead: bool
    ) -> Shipment | None:
        if not lane.streams or is_transformed():
            return None
        if lane.pins and not unit.was_pinned:
            unit.was_pinned = True
            unit.block = pin_resting(rests, lane.backend, self._budget, mapped=unit.pins_mapped)
        state = _state(rests)
        signatures = state[0]
        if unit.layout is None or unit.layout[0] != signatures:
            unit.layout = (signatures, lay_out(rests, unit.block, lane.pins, unit.loose(rests)))
        layout = unit.layout[1]
        if not layout.pieces:
            return None
        buffer = lane.pool.take(layout.nbytes, padding=layout.padding, ahead=ahead)
        if buffer is None:
            return None
        shipment = Shipment(lane, layout, buffer, state, owner, id(unit))
        with torch._C.DisableTorchFunction():  # a mode of the caller's has no business here
            try:
                shipment.start(rests, unit.block, unit.name, ahead=ahead)
            except BaseException:
                shipment.cancel()  # what is queued arrives before the buffer serves others
                raise
        return shipment

    # ------------------------------------------------------------------ taking back

    def cancel(self, which: Callable[[Shipment], bool]) -> bool:
        """Give up shipments that nobody has claimed; say whether there were any."""
        chosen = [key for key, shipment in self._ahead.items() if which(shipment)]
        for key in chosen:
            self._ahead.pop(key).cancel()
        return bool(chosen)

    def relieve(self, lane: Lane) -> None:
        """A device is out of memory: give back what is not in use, and send nothing ahead."""
        self.cancel(lambda shipment: shipment.lane is lane)
        lane.pool.clear()
        lane.backend.empty_cache(lane.index)
        if not lane.tight:
            lane.tight = True
            warnings.warn(
                f"{lane.device} is out of memory for weights that travel ahead; from now on each "
                "unit travels when it is needed. Keep more room: a lower max_memory for this "
                "device, or a smaller prefetch_depth.",
                RuntimeWarning,
                stacklevel=2,
            )

    def settle(self) -> None:
        """Wait until nothing that travels reads resting weights."""
        for shipment in self._ahead.values():
            shipment.wait_queued()
        for lane in self._lanes.values():
            if lane.streams:
                lane.backend.synchronize_event(lane.mark(lane.side))

    def close(self, *, wait: bool) -> None:
        """Give everything up.

        Args:
            wait: for readers to end; they end soon in any case.
        """
        self.cancel(lambda _: True)
        for lane in self._lanes.values():
            lane.stager.close(wait=wait)
            lane.pool.clear()


def _state(rests: list[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
    """What must not have changed between a departure and the use of what has arrived."""
    versions = tuple(0 if t.is_inference() else t._version for t in rests)
    return tuple(signature(t) for t in rests), versions
