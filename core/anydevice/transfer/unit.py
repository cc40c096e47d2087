"""A unit: weights that travel together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from anydevice.devices import Device
from anydevice.errors import UnplacedWeightError
from anydevice.modules import Slot
from anydevice.transfer.twins import is_lazy, make_twin
from anydevice.transfer.visit import Guest, Visit

if TYPE_CHECKING:
    from anydevice.transfer.engine import Engine

__all__ = ["Unit"]


class Unit:
    """Weights that are on one device while a module runs. Made by `Engine.unit`.

    Between `enter` and `leave` the slots hold twins on `device`; else the resting tensors, which
    are looked up at each `enter`, so assigning or loading weights needs no word to anyone.

    May be entered by several threads, and again by a thread that is inside; also a context manager.

    Attributes:
        name: of the module, for messages.
        names: of the weights, in the order of `slots`.
        slots: where they stand.
        device: where they are needed.
        compute_dtype: the twins' dtype, for floating-point weights; None keeps each one's own.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        slots: Sequence[tuple[str, Slot]],
        device: Device,
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.name = name
        self.names = [n for n, _ in slots]
        self.slots = [s for _, s in slots]
        self.device = device
        self.compute_dtype = compute_dtype
        self._engine = engine
        self._reset()

    def _reset(self) -> None:
        self._place = self.device.torch
        self._visit: Visit | None = None
        #: What each thread's calls hold, innermost last.
        self._held: dict[int, list[list[Visit]]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no calls inside."""
        run_time = ("_visit", "_held", "_place")
        return {k: v for k, v in self.__dict__.items() if k not in run_time}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self) -> str:
        return f"<Unit {self.name!r}: {len(self.slots)} tensors for {self.device}>"

    # ------------------------------------------------------------------ a call

    def enter(self) -> None:
        """Let all slots hold tensors on `device`, ready for the calling thread's current stream.

        Raises:
            UnplacedWeightError: a weight is on meta, that is, was never loaded.
        """
        place, dtype, standing = self._place, self.compute_dtype, self._engine._standing
        for module, name, is_buffer in self.slots:
            tensor = (module._buffers if is_buffer else module._parameters).get(name)
            if tensor is not None and (
                tensor.device != place
                or (dtype is not None and tensor.dtype != dtype and tensor.is_floating_point())
                or (standing and id(tensor) in standing)
            ):
                self._enter()
                return

    def leave(self) -> None:
        """End what `enter` began; after the last call the resting tensors are back."""
        if self._held:
            self._leave()

    def __enter__(self) -> Unit:
        self.enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    # ------------------------------------------------------------------ where something moves

    def _enter(self) -> None:
        with self._engine._lock:
            visits = self._visits()
            for visit in visits:
                visit.count += 1
            self._held.setdefault(threading.get_ident(), []).append(visits)

    def _visits(self) -> list[Visit]:
        """The visits that this call needs: those under way, and one for what is missing."""
        standing = self._engine._standing
        found: dict[int, Visit] = {}
        missing = []
        for index, slot in enumerate(self.slots):
            tensor = slot.get()
            if tensor is None or is_lazy(tensor):
                continue
            visit = standing.get(id(tensor))
            if visit is not None:
                found[id(visit)] = visit
            elif tensor.device != self._place or self._is_cast(tensor):
                missing.append((self.names[index], slot, tensor))
        if missing:
            self._visit = visit = self._bring(missing)
            found[id(visit)] = visit
        return list(found.values())

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        dtype = self.compute_dtype
        return dtype is not None and tensor.dtype != dtype and tensor.is_floating_point()

    def _bring(self, missing: list[tuple[str, Slot, torch.Tensor]]) -> Visit:
        for name, _, rest in missing:
            if rest.is_meta and self._place.type != "meta":
                raise UnplacedWeightError(
                    f"{name} (of {self.name}) is on meta: it was never loaded, so it cannot be "
                    f"brought to {self.device}. Load a checkpoint that has it, or give it a value "
                    "with set_module_tensor_to_device."
                )
        twins: dict[int, torch.Tensor] = {}
        guests = []
        for _, slot, rest in missing:
            twin = twins.get(id(rest))
            if twin is None:
                twin = twins[id(rest)] = make_twin(rest, self.device, self.compute_dtype)
            guests.append(Guest.of(slot, rest, twin))
        visit = Visit(self.device, guests)
        visit.begin()
        self._engine._standing.update((id(g.twin), visit) for g in guests)
        return visit

    def _leave(self) -> None:
        thread = threading.get_ident()
        with self._engine._lock:
            calls = self._held.get(thread)
            if not calls:
                return
            visits = calls.pop()
            if not calls:
                del self._held[thread]
            for visit in visits:
                visit.count -= 1
                if visit.count == 0:
                    for guest in visit.guests:
                        self._engine._standing.pop(id(guest.twin), None)
                    visit.end()
