"""The engine: decides when weights move."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anydevice.devices import Device
from anydevice.modules import Slot
from anydevice.transfer.unit import Unit
from anydevice.transfer.visit import Visit

__all__ = ["Engine"]


class Engine:
    """Brings the units of one model to their devices. May be copied and pickled.

    Args:
        prefetch_depth: how many units may travel ahead of the one that computes; 0 for none.
        room: bytes kept free on each executing device for visiting units; by default measured.
        pin_budget: bytes of host memory that may be page-locked; by default measured.
    """

    def __init__(
        self,
        *,
        prefetch_depth: int = 1,
        room: Mapping[Device, int] | None = None,
        pin_budget: int | None = None,
    ) -> None:
        self.prefetch_depth = prefetch_depth
        self.room = dict(room) if room is not None else None
        self.pin_budget = pin_budget
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        #: Twins that stand in slots now, by id.
        self._standing: dict[int, Visit] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has its settings alone."""
        return {n: getattr(self, n) for n in ("prefetch_depth", "room", "pin_budget")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def unit(
        self,
        name: str,
        slots: Sequence[tuple[str, Slot]],
        device: Device,
        *,
        compute_dtype: torch.dtype | None = None,
    ) -> Unit:
        """Make a unit: weights that travel together.

        Args:
            name: of the module, for messages.
            slots: full names of the weights, and where they stand.
            device: where they are needed.
            compute_dtype: the dtype that floating-point weights have there; None for their own.
        """
        return Unit(self, name, slots, device, compute_dtype)

    def close(self) -> None:
        """Wait for what travels; drop buffers and threads. The engine may be used again."""
