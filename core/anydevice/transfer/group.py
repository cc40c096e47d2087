"""A group: weights that are copied together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from anydevice.devices import CPU, Device
from anydevice.errors import UnplacedWeightError
from anydevice.transfer.copy_plan import CopyPlan
from anydevice.transfer.device_copy import is_lazy
from anydevice.transfer.readahead import is_worth_reading_ahead
from anydevice.transfer.residency import Residency
from anydevice.transfer.saved import SavedWeights
from anydevice.weights import Slot, iter_slots

if TYPE_CHECKING:
    from anydevice.transfer.engine import Engine

__all__ = ["GroupCall", "OffloadGroup"]


class OffloadGroup:
    """Weights that are on one device while a module runs. Made by `Engine.group`.

    They are the parameters and buffers that some modules own. During a `GroupCall` the modules hold
    copies on `device`, else the originals. These are looked up at each call, so weights may be
    assigned, loaded, added and removed at any time in between.

    It holds no reference to the modules, so a model that holds the group is in no cycle.

    Attributes:
        name: of the module, for messages.
        device: where they are needed.
        compute_dtype: the copies' dtype, for floating-point weights; None keeps each one's own.
        pins_mapped: whether weights that are views of files may be page-locked in memory.
        compares: whether writes to the copies' ``.data``, which no version shows, are found by
            comparing when a call ends.
        prefetch_score: how often a guess that it comes next was right, less how often it was wrong.
        plan: how it is copied, and the signature of the weights for which that was planned.
        was_pinned: whether its weights were page-locked, as far as they can be.
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
        self._torch_device = self.device.torch
        #: Ids of the calls for which something was copied.
        self._inside: set[int] = set()
        #: Whether a call of any thread is inside, and device copies stand in the modules. A plain
        #: value: the compiler guards on what it reads.
        self.is_entered = False
        self.prefetch_score = 0
        self.plan: tuple[Any, CopyPlan] | None = None
        self.was_pinned = False
        #: Whether it computes on the host from weights in files; None: not known yet.
        self._is_mapped: bool | None = None if self.device == CPU else False
        self._engine.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no calls inside."""
        state: dict[str, Any] = {name: getattr(self, name) for name in _KEPT}
        state["_modules"] = [(n, m) for n, ref in self._modules if (m := ref()) is not None]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._modules = tuple((n, weakref.ref(m)) for n, m in state["_modules"])
        self._reset()

    def __repr__(self) -> str:
        return f"<OffloadGroup {self.name!r}: {len(self.tensors())} tensors for {self.device}>"

    def call(self) -> GroupCall:
        """A call of the module; see `GroupCall`."""
        return GroupCall(self)

    # ------------------------------------------------------------------ its weights

    def is_ready(self) -> bool:
        """Whether no weight has to be copied; asked at every call."""
        device = self._torch_device
        for table in self._tables or self._find_tables():
            if table:
                for tensor in table.values():
                    if tensor is not None and tensor.device != device:
                        return False
        resident = self._engine.resident
        if (resident or self.compute_dtype is not None) and any(
            id(tensor) in resident or self._is_cast(tensor) for tensor in self.tensors()
        ):
            return False
        if self._is_mapped is not False:
            if self._is_mapped is None:
                self._is_mapped = is_worth_reading_ahead(self.tensors())
            if self._is_mapped:
                self._engine.compute_on_host(self)
        return True

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the modules own now."""
        tables = self._tables or self._find_tables()
        return [tensor for table in tables for tensor in table.values() if tensor is not None]

    def missing(self, resident: Container[int]) -> list[tuple[str, Slot, torch.Tensor]]:
        """The weights that have to be copied: full names, slots and tensors.

        Args:
            resident: ids of device copies.
        """
        device, found = self._torch_device, []
        for prefix, ref in self._modules:
            if (module := ref()) is not None:
                for name, slot in iter_slots(module, prefix, recurse=False):
                    tensor = slot.table[slot.name]
                    if (
                        (tensor.device != device or self._is_cast(tensor))
                        and id(tensor) not in resident
                        and not is_lazy(tensor)
                    ):
                        found.append((name, slot, tensor))
        return found

    def require_values(self, missing: Sequence[tuple[str, Slot, torch.Tensor]]) -> None:
        """Make sure that all weights that have to be copied hold values.

        Raises:
            UnplacedWeightError: one is on meta, so it was never loaded.
        """
        for name, _, original in missing:
            if original.is_meta and self._torch_device.type != "meta":
                raise UnplacedWeightError(
                    f"{name} (of {self.name}) is on meta: it was never loaded, so it "
                    f"cannot be copied to {self.device}. Load a checkpoint that has it, or give "
                    "it a value with set_module_tensor_to_device."
                )

    def must_be_cast_first(
        self, originals: Sequence[torch.Tensor], supports: Callable[[torch.dtype], bool]
    ) -> list[int]:
        """Indices of tensors that the device cannot hold before they are cast."""
        if self.compute_dtype is None:
            return []
        return [i for i, t in enumerate(originals) if self._is_cast(t) and not supports(t.dtype)]

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        dtype = self.compute_dtype
        return dtype is not None and tensor.dtype != dtype and tensor.is_floating_point()

    def _find_tables(self) -> tuple[dict[str, Any], ...]:
        modules: Iterator[nn.Module] = (m for _, ref in self._modules if (m := ref()) is not None)
        self._tables = tuple(t for m in modules for t in (m._parameters, m._buffers))
        return self._tables


class GroupCall:
    """One call of a group's module. May be made in any thread, and inside another call.

    [Note: cleaning up in spite of interrupts]
    An interrupt (Ctrl-C, an exception from another thread) may come at any instruction, also in the
    middle of `leave`. So `leave` may be called again: it finishes what is left, and also undoes an
    `enter` that came half-way. Two nested ``finally`` make sure that one of the calls is complete::

        call = group.call()
        try:
            try:
                call.enter()
                ...
            finally:
                call.leave()
        finally:
            call.leave()
    """

    __slots__ = ("_group", "_held", "_saved")

    def __init__(self, group: OffloadGroup) -> None:
        self._group = group
        self._held: list[Residency] | None = None  # once something had to be copied
        self._saved: SavedWeights | None = None

    def enter(self) -> None:
        """Let the modules hold tensors on the device, ready for the thread's current stream.

        Raises:
            UnplacedWeightError: a weight is on meta, so it was never loaded.
            RuntimeError: the device has no memory for them.
        """
        group = self._group
        if group.is_ready():
            return
        held = self._held = []
        group._inside.add(id(self))
        group.is_entered = True
        group._engine.enter(group, held)
        if torch.is_grad_enabled():
            swapped = (swap for residency in held for swap in residency.swapped)
            self._saved = SavedWeights(swapped, group.device)
            self._saved.start()

    def leave(self) -> None:
        """End the call; after the last one the modules hold the originals again."""
        group, held = self._group, self._held
        if held is None:
            return
        if self._saved is not None:
            self._saved.stop()
            self._saved = None
        if held:
            group._engine.leave(held)
        group._inside.discard(id(self))
        group.is_entered = bool(group._inside)
        self._held = None

    def __enter__(self) -> GroupCall:
        try:
            self.enter()
        except BaseException:
            self.leave()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.leave()
        finally:
            self.leave()


#: What a copy of a group takes along, besides the modules.
_KEPT: Final = ("name", "device", "compute_dtype", "pins_mapped", "compares", "_engine")
