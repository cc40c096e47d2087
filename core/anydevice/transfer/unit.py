"""A unit: weights that travel together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch

from anydevice.devices import CPU, Device
from anydevice.errors import UnplacedWeightError
from anydevice.transfer import profile
from anydevice.transfer.layout import Layout
from anydevice.transfer.reading import is_worth_reading_ahead
from anydevice.transfer.twins import is_lazy, make_twin, twins_of_data
from anydevice.transfer.visit import Guest, Visit
from anydevice.weights import Slot

if TYPE_CHECKING:
    from anydevice.transfer.engine import Engine
    from anydevice.transfer.lane import Lane
    from anydevice.transfer.shipment import Shipment

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
        compares: whether writes to the twins' ``.data``, of which nothing tells, are found by
            comparing when they leave.
    """

    compares = False

    def __init__(
        self,
        engine: Engine,
        name: str,
        slots: Sequence[tuple[str, Slot]],
        device: Device,
        compute_dtype: torch.dtype | None,
        pins_mapped: bool,
    ) -> None:
        self.name = name
        self.names = [n for n, _ in slots]
        self.slots = [s for _, s in slots]
        self.device = device
        self.compute_dtype = compute_dtype
        self.pins_mapped = pins_mapped
        self._engine = engine
        self._reset()

    def _reset(self) -> None:
        self._place = self.device.torch
        #: What each thread's calls hold, innermost last.
        self._held: dict[int, list[list[Visit]]] = {}
        # What the engine knows of the unit.
        self.luck = 0
        self.layout: tuple[Any, Layout] | None = None
        self.was_pinned = False
        self.block: torch.Tensor | None = None
        #: Whether it computes on the host from weights in files; None: not known yet.
        self._is_mapped: bool | None = None if self.device == CPU else False
        self._engine._course.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no calls inside."""
        return {k: v for k, v in self.__dict__.items() if k not in _RUN_TIME}

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
        if self._held:
            calls = self._held.get(threading.get_ident())
            if calls:  # a call inside a call: all is there, and stays until the outer one ends
                calls.append([])
                return
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
        if self._is_mapped is not False:
            self._pass_on_host()

    def leave(self) -> None:
        """End what `enter` began; after the last call the resting tensors are back."""
        if self._held:
            calls = self._held.get(threading.get_ident())
            if calls:
                if calls[-1]:
                    self._leave()
                else:
                    calls.pop()
                    if not calls:
                        del self._held[threading.get_ident()]

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

    def _pass_on_host(self) -> None:
        if self._is_mapped is None:
            self._is_mapped = is_worth_reading_ahead(self.tensors())
        if self._is_mapped:
            self._engine._pass_on_host(self)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that stand in the slots now."""
        return [tensor for slot in self.slots if (tensor := slot.get()) is not None]

    # ------------------------------------------------------------------ where something moves

    def _enter(self) -> None:
        engine, gradients = self._engine, torch.is_grad_enabled()
        # Inference tensors count no versions, and by its version a change is known.
        with engine._lock, torch.inference_mode(False), torch.set_grad_enabled(gradients):
            lap = engine._step(self)
            visits = self._visits()
            for visit in visits:
                visit.join()
            self._held.setdefault(threading.get_ident(), []).append(visits)
            try:
                engine._prefetch(lap)
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        thread = threading.get_ident()
        with self._engine._lock:
            calls = self._held[thread]
            visits = calls.pop()
            if not calls:
                del self._held[thread]
            for visit in visits:
                if visit.part():
                    self._engine._end(visit)

    def _visits(self) -> list[Visit]:
        """The visits that this call needs: those under way, and one for what is missing."""
        standing = self._engine._standing
        visits = []
        if standing:
            found = (standing.get(id(slot.get())) for slot in self.slots)
            visits = list({id(visit): visit for visit in found if visit is not None}.values())
        missing = self._missing()
        if missing:
            visits.append(self._bring(missing))
        return visits

    def _missing(self) -> list[tuple[int, torch.Tensor]]:
        """Indices of slots whose tensors must come, and these tensors."""
        standing, place = self._engine._standing, self._place
        missing = []
        for index, (module, name, is_buffer) in enumerate(self.slots):
            tensor = (module._buffers if is_buffer else module._parameters).get(name)
            if (
                tensor is not None
                and (tensor.device != place or self._is_cast(tensor))
                and id(tensor) not in standing
                and not is_lazy(tensor)
            ):
                missing.append((index, tensor))
        return missing

    def missing_tensors(self) -> list[torch.Tensor]:
        """The tensors that must come, each once; none where that cannot be: the call will tell."""
        found = list({id(t): t for _, t in self._missing()}.values())
        return [] if any(t.is_meta for t in found) else found

    def loose(self, rests: list[torch.Tensor]) -> list[int]:
        """Indices of tensors that the device cannot hold before they are cast."""
        if self.compute_dtype is None:
            return []
        supports = self._engine._runtime.lane(self.device).backend.supports_dtype
        return [i for i, t in enumerate(rests) if self._is_cast(t) and not supports(t.dtype)]

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        dtype = self.compute_dtype
        return dtype is not None and tensor.dtype != dtype and tensor.is_floating_point()

    def _bring(self, missing: list[tuple[int, torch.Tensor]]) -> Visit:
        """Begin a visit: twins of tensors stand in their slots, each tensor's once."""
        self._check(missing)
        lane = self._engine._runtime.lane(self.device)
        rests = list({id(t): t for _, t in missing}.values())
        recorder = profile.active
        span = recorder.enters(lane, self.name) if recorder is not None else None
        shipment = self._engine._claim(self, rests)
        if span is not None and shipment is not None:
            span.link = shipment.span
        try:
            twins = self._twins(rests, shipment, lane)
        except BaseException:
            if shipment is not None:
                shipment.cancel()
            raise
        guests = [Guest.of(self.slots[i], rest, twins[id(rest)]) for i, rest in missing]
        visit = Visit(lane, guests, shipment, span, self.compares)
        # First: a call on another thread must not take a twin for a weight that stays.
        self._engine._standing.update((id(guest.twin), visit) for guest in guests)
        visit.begin()
        return visit

    def _twins(
        self, rests: list[torch.Tensor], shipment: Shipment | None, lane: Lane
    ) -> dict[int, torch.Tensor]:
        twins = {}
        if shipment is not None:
            shipment.arrive(lane.here())
            twins = twins_of_data(rests, shipment.data(rests), self.device, self.compute_dtype)
        for i, rest in enumerate(rests):
            if i not in twins:
                twins[i] = self._make_twin(rest, lane)
        return {id(rest): twins[i] for i, rest in enumerate(rests)}

    def _make_twin(self, rest: torch.Tensor, lane: Lane) -> torch.Tensor:
        recorder = profile.active
        if recorder is None or rest.device == self._place:
            return self._make_twin_somehow(rest, lane)
        span = recorder.travels_alone(lane, self.name, rest.nbytes)
        twin = self._make_twin_somehow(rest, lane)
        recorder.now(span)
        return twin

    def _make_twin_somehow(self, rest: torch.Tensor, lane: Lane) -> torch.Tensor:
        try:
            return make_twin(rest, self.device, self.compute_dtype)
        except Exception as error:
            if not lane.lacks_memory(error):
                raise
        self._engine._runtime.relieve(lane)
        return make_twin(rest, self.device, self.compute_dtype)

    def _check(self, missing: list[tuple[int, torch.Tensor]]) -> None:
        for index, rest in missing:
            if rest.is_meta and self._place.type != "meta":
                raise UnplacedWeightError(
                    f"{self.names[index]} (of {self.name}) is on meta: it was never loaded, so it "
                    f"cannot be brought to {self.device}. Load a checkpoint that has it, or give "
                    "it a value with set_module_tensor_to_device."
                )


#: What a copy of a unit does not take along.
_RUN_TIME: Final = frozenset(
    {"_held", "_place", "luck", "layout", "was_pinned", "block", "_is_mapped"}
)
