"""The engine: decides when weights move."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from anydevice.devices import CPU, Device, DeviceLike
from anydevice.transfer.order import Course, Lap
from anydevice.transfer.reading import page_faults
from anydevice.transfer.runtime import Runtime
from anydevice.transfer.settings import read_pin_budget, read_prefetch_depth, read_room
from anydevice.transfer.shipment import Shipment
from anydevice.transfer.unit import Unit
from anydevice.transfer.visit import Visit
from anydevice.weights import Slot

__all__ = ["Engine"]


class Engine:
    """Brings the units of one model to their devices. May be copied and pickled.

    How work is ordered without stopping the host is told in docs/transfers.md.

    Args:
        prefetch_depth: how many units may travel ahead of the one that computes; 0 for none.
        room: bytes, or such as ``"2GiB"``, kept free on each executing device for visiting units,
            by any spelling of the device; None, or a device that is not named, stands for half of
            what is free when the first unit comes. What must be there is brought whatever the room.
        pin_budget: bytes, or such as ``"16GiB"``, of host memory that may be page-locked for
            resting weights; None for half of what is free when it is first needed.

    Raises:
        OptionError: ``prefetch_depth`` is not a whole number from 0 up.
        BudgetError: a size cannot be read.
        UnknownDeviceError: a device of ``room`` cannot be read.
    """

    def __init__(
        self,
        *,
        prefetch_depth: int = 1,
        room: Mapping[DeviceLike, int | str] | Mapping[Device, int] | None = None,
        pin_budget: int | str | None = None,
    ) -> None:
        self.prefetch_depth = read_prefetch_depth(prefetch_depth)
        self.room = read_room(room)
        self.pin_budget = read_pin_budget(pin_budget)
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        #: Twins that stand in slots now, by id.
        self._standing: dict[int, Visit] = {}
        self._course = Course()
        self._laps: dict[int, Lap] = {}
        self._faults = page_faults()
        self._renew_runtime()
        _engines.add(self)

    def _renew_runtime(self) -> None:
        self._runtime = Runtime(self.room or {}, self.pin_budget)
        self._closer = weakref.finalize(self, self._runtime.close, wait=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its settings alone."""
        return {n: getattr(self, n) for n in ("prefetch_depth", "room", "pin_budget")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # ------------------------------------------------------------------ for hooks

    def unit(
        self,
        name: str,
        slots: Sequence[tuple[str, Slot]],
        device: Device,
        *,
        compute_dtype: torch.dtype | None = None,
        resting: Device | None = None,
    ) -> Unit:
        """Make a unit: weights that travel together. Make them in the order of execution.

        Args:
            name: of the module, for messages.
            slots: full names of the weights, and where they stand.
            device: where they are needed.
            compute_dtype: the dtype that floating-point weights have there; None for their own.
            resting: where they rest by plan. On ``cpu``, weights that are views of a file may be
                page-locked in memory too; on ``disk``, or not said, they stay in their file.
        """
        return Unit(self, name, slots, device, compute_dtype, resting == CPU)

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
            lap = self._lap(threading.get_ident())
            if lap.depth == 0:
                self._finish(lap)
            lap.depth += 1

    def end_pass(self) -> None:
        """Say that the call has ended, also when it failed."""
        thread = threading.get_ident()
        with self._lock:
            lap = self._lap(thread)
            lap.depth -= 1
            if lap.depth == 0:
                self._finish(lap)
                self._laps.pop(thread, None)

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

    # ------------------------------------------------------------------ for units, under the lock

    def _lap(self, thread: int) -> Lap:
        lap = self._laps.get(thread)
        if lap is None:
            if len(self._laps) > _MOST_LAPS:  # threads that are gone, most likely
                self._laps.clear()
            lap = self._laps[thread] = Lap(self._course)
        return lap

    def _finish(self, lap: Lap) -> None:
        lap.finish()
        self._runtime.cancel(lambda shipment: shipment.owner == id(lap))

    def _step(self, unit: Unit) -> Lap:
        """A unit is entered by the calling thread."""
        lap = self._lap(threading.get_ident())
        if lap.step(unit):
            self._runtime.cancel(lambda s: s.owner == id(lap) and s.unit != id(unit))
        return lap

    def _prefetch(self, lap: Lap) -> None:
        """Let the next units set out."""
        if not self.prefetch_depth:
            return
        upcoming = lap.upcoming(self.prefetch_depth)
        wanted = {id(unit) for unit in upcoming}
        for unit in upcoming:
            if not self._runtime.send_ahead(unit, id(lap), wanted):
                return

    def _pass_on_host(self, unit: Unit) -> None:
        """A unit computes on the host, from weights that are views of files.

        While the disk is being read at all, the next units are read ahead.
        """
        faults = page_faults()
        with self._lock:
            lap = self._step(unit)
            if faults != self._faults:
                self._faults = faults
                for following in lap.upcoming(max(1, self.prefetch_depth)):
                    self._runtime.read_ahead(following)

    def _claim(self, unit: Unit, rests: list[torch.Tensor]) -> Shipment | None:
        """What travels, or has arrived, for a unit; it sets out now where it has not before."""
        return self._runtime.claim(unit, rests, id(self._laps.get(threading.get_ident())))

    def _end(self, visit: Visit) -> None:
        """A visit's last call is over."""
        twins = [id(guest.twin) for guest in visit.guests]  # no twin may stay in a variable here
        try:
            visit.end()
        finally:
            for twin in twins:
                self._standing.pop(twin, None)

    def _abandon(self) -> None:
        """In the child of a fork: its threads and its device's work are not there."""
        self._lock = threading.RLock()
        self._closer.detach()
        _left_behind.append(self._runtime)
        self._laps = {}
        self._renew_runtime()


_MOST_LAPS: Final = 64
_engines: Final[weakref.WeakSet[Engine]] = weakref.WeakSet()
#: What a forked child must not free: memory of devices that are its parent's.
_left_behind: Final[list[Runtime]] = []


def _after_fork() -> None:
    for engine in list(_engines):
        engine._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
