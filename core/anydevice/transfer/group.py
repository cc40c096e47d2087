"""A group: weights that travel together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from anydevice.devices import CPU, Device
from anydevice.errors import UnplacedWeightError
from anydevice.transfer import profile
from anydevice.transfer.copy_plan import CopyPlan
from anydevice.transfer.device_copy import copies_of_data, is_lazy, make_device_copy
from anydevice.transfer.readahead import is_worth_reading_ahead
from anydevice.transfer.residency import Residency, SwappedTensor
from anydevice.weights import Slot, iter_slots

if TYPE_CHECKING:
    from anydevice.transfer.engine import Engine
    from anydevice.transfer.queue import DeviceQueue
    from anydevice.transfer.transfer import Transfer

__all__ = ["OffloadGroup"]


class OffloadGroup:
    """Weights that are on one device while a module runs. Made by `Engine.group`.

    They are the parameters and buffers that some modules own. Between `enter` and `leave` the
    modules hold copies on `device`, else the resting tensors. These are looked up at each `enter`,
    so weights may be assigned, loaded, added and removed at any time in between.

    May be entered by several threads, and again by a thread that is inside; also a context manager.
    It holds no reference to the modules, so a model that holds the group is in no cycle.

    Attributes:
        name: of the module, for messages.
        device: where they are needed.
        compute_dtype: the copies' dtype, for floating-point weights; None keeps each one's own.
        compares: whether writes to the copies' ``.data``, of which nothing tells, are found by
            comparing when they leave.
    """

    compares = False

    def __init__(
        self,
        engine: Engine,
        name: str,
        modules: Sequence[tuple[str, nn.Module]],
        device: Device,
        compute_dtype: torch.dtype | None,
        pins_mapped: bool,
    ) -> None:
        self.name = name
        distinct = {id(m): (n, weakref.ref(m)) for n, m in reversed(modules)}
        self._modules = tuple(reversed(distinct.values()))
        self.device = device
        self.compute_dtype = compute_dtype
        self.pins_mapped = pins_mapped
        self._engine = engine
        self._reset()

    def _reset(self) -> None:
        #: The modules' own dicts of weights; empty until they are needed.
        self._tables: tuple[dict[str, Any], ...] = ()
        self._place = self.device.torch
        #: What each thread's calls hold, innermost last.
        self._held: dict[int, list[list[Residency]]] = {}
        # What the engine knows of the group.
        self.prefetch_score = 0
        self.plan: tuple[Any, CopyPlan] | None = None
        self.was_pinned = False
        self.block: torch.Tensor | None = None
        #: Whether it computes on the host from weights in files; None: not known yet.
        self._is_mapped: bool | None = None if self.device == CPU else False
        self._engine._trace.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no calls inside."""
        state = {k: v for k, v in self.__dict__.items() if k not in _RUN_TIME}
        state["_modules"] = [(n, m) for n, ref in self._modules if (m := ref()) is not None]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._modules = tuple((n, weakref.ref(m)) for n, m in state["_modules"])
        self._reset()

    def __repr__(self) -> str:
        return f"<OffloadGroup {self.name!r}: {len(self.tensors())} tensors for {self.device}>"

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
        for table in self._tables or self._find_tables():
            for tensor in table.values():
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

    def __enter__(self) -> OffloadGroup:
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

    @property
    def is_entered(self) -> bool:
        """Whether a call of any thread is inside."""
        return bool(self._held)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the modules own now."""
        tables = self._tables or self._find_tables()
        return [tensor for table in tables for tensor in table.values() if tensor is not None]

    def _find_tables(self) -> tuple[dict[str, Any], ...]:
        modules = [module for _, ref in self._modules if (module := ref()) is not None]
        self._tables = tuple(t for m in modules for t in (m._parameters, m._buffers))
        return self._tables

    def _slots(self) -> Iterator[tuple[str, Slot]]:
        """The weights' full names, and where they stand."""
        for prefix, ref in self._modules:
            module = ref()
            if module is not None:
                yield from iter_slots(module, prefix, recurse=False)

    # ------------------------------------------------------------------ where something moves

    def _enter(self) -> None:
        engine, gradients = self._engine, torch.is_grad_enabled()
        # Inference tensors count no versions, and by its version a change is known.
        with engine._lock, torch.inference_mode(False), torch.set_grad_enabled(gradients):
            current = engine._step(self)
            residencies = self._residencies()
            for residency in residencies:
                residency.join()
            self._held.setdefault(threading.get_ident(), []).append(residencies)
            try:
                engine._prefetch(current)
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        thread = threading.get_ident()
        with self._engine._lock:
            calls = self._held[thread]
            residencies = calls.pop()
            if not calls:
                del self._held[thread]
            for residency in residencies:
                if residency.part():
                    self._engine._end(residency)

    def _residencies(self) -> list[Residency]:
        """The residencies that this call needs: those under way, and one for what is missing."""
        standing = self._engine._standing
        residencies = []
        if standing:
            found = (standing.get(id(tensor)) for tensor in self.tensors())
            residencies = list(
                {id(residency): residency for residency in found if residency is not None}.values()
            )
        missing = self._missing()
        if missing:
            residencies.append(self._onload(missing))
        return residencies

    def _missing(self) -> list[tuple[str, Slot, torch.Tensor]]:
        """The weights that must come: full names, slots and tensors."""
        standing, place = self._engine._standing, self._place
        missing = []
        for name, slot in self._slots():
            tensor = slot.table[slot.name]
            if (
                (tensor.device != place or self._is_cast(tensor))
                and id(tensor) not in standing
                and not is_lazy(tensor)
            ):
                missing.append((name, slot, tensor))
        return missing

    def missing_tensors(self) -> list[torch.Tensor]:
        """The tensors that must come, each once; none where that cannot be: the call will tell."""
        found = list({id(t): t for _, _, t in self._missing()}.values())
        return [] if any(t.is_meta for t in found) else found

    def loose(self, originals: list[torch.Tensor]) -> list[int]:
        """Indices of tensors that the device cannot hold before they are cast."""
        if self.compute_dtype is None:
            return []
        supports = self._engine._runtime.queue(self.device).backend.supports_dtype
        return [i for i, t in enumerate(originals) if self._is_cast(t) and not supports(t.dtype)]

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        dtype = self.compute_dtype
        return dtype is not None and tensor.dtype != dtype and tensor.is_floating_point()

    def _onload(self, missing: list[tuple[str, Slot, torch.Tensor]]) -> Residency:
        """Begin a residency: copies of tensors stand in their slots, each tensor's once."""
        self._check(missing)
        queue = self._engine._runtime.queue(self.device)
        originals = list({id(t): t for _, _, t in missing}.values())
        recorder = profile.active
        span = recorder.enters(queue, self.name) if recorder is not None else None
        transfer = self._engine._claim(self, originals)
        if span is not None and transfer is not None:
            span.link = transfer.span
        try:
            copies = self._device_copies(originals, transfer, queue)
        except BaseException:
            if transfer is not None:
                transfer.cancel()
            raise
        swapped = [
            SwappedTensor.of(slot, original, copies[id(original)]) for _, slot, original in missing
        ]
        residency = Residency(queue, swapped, transfer, span, self.compares)
        # First: a call on another thread must not take a copy for a weight that stays.
        self._engine._standing.update((id(swap.copy), residency) for swap in swapped)
        residency.begin()
        return residency

    def _device_copies(
        self, originals: list[torch.Tensor], transfer: Transfer | None, queue: DeviceQueue
    ) -> dict[int, torch.Tensor]:
        copies = {}
        if transfer is not None:
            transfer.arrive(queue.here())
            copies = copies_of_data(
                originals, transfer.data(originals), self.device, self.compute_dtype
            )
        for i, original in enumerate(originals):
            if i not in copies:
                copies[i] = self._copy_alone(original, queue)
        return {id(original): copies[i] for i, original in enumerate(originals)}

    def _copy_alone(self, original: torch.Tensor, queue: DeviceQueue) -> torch.Tensor:
        recorder = profile.active
        if recorder is None or original.device == self._place:
            return self.copy_with_oom_retry(original, queue)
        span = recorder.travels_alone(queue, self.name, original.nbytes)
        copy = self.copy_with_oom_retry(original, queue)
        recorder.now(span)
        return copy

    def copy_with_oom_retry(self, original: torch.Tensor, queue: DeviceQueue) -> torch.Tensor:
        """Copy one tensor; where memory lacks, give what is not in use back and try again."""
        try:
            return make_device_copy(original, self.device, self.compute_dtype)
        except Exception as error:
            if not queue.lacks_memory(error):
                raise
        self._engine._runtime.relieve(queue)
        return make_device_copy(original, self.device, self.compute_dtype)

    def _check(self, missing: list[tuple[str, Slot, torch.Tensor]]) -> None:
        for name, _, original in missing:
            if original.is_meta and self._place.type != "meta":
                raise UnplacedWeightError(
                    f"{name} (of {self.name}) is on meta: it was never loaded, so it "
                    f"cannot be brought to {self.device}. Load a checkpoint that has it, or give "
                    "it a value with set_module_tensor_to_device."
                )


#: What a copy of a group does not take along.
_RUN_TIME: Final = frozenset(
    {"_held", "_place", "_tables", "prefetch_score", "plan", "was_pinned", "block", "_is_mapped"}
)
