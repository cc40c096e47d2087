"""A log of tensor operations that ran on meta, and running a slice of it for real.

The log is about storages, not about tensors: a step reads some storages and writes others, and a
tensor is a view (dtype, size, stride, offset) of one. Views need no step. The content of a storage
is what its steps, and those of the storages that they read, compute when they run in order. Each
step runs at most once. A step is closed: every tensor in it is a view of a storage of the log, or a
small constant that was copied.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import torch
from torch import nn

from anydevice.init_empty.draws import Draws
from anydevice.init_empty.real_storages import RealStorages
from anydevice.init_empty.steps import Step, View, flat_tensors, map_call
from anydevice.tensors import storage_address

__all__ = ["MAX_CONSTANT", "Log"]

#: Bytes of a real tensor that is copied into the log where an operation of the log reads it.
MAX_CONSTANT: Final = 1 << 20


class Log:
    """The operations of one thread in one context, and what has been made real of them.

    Attributes:
        is_off: operations go straight to torch: the log itself is at work.
        is_eager: operations run for real: a function that needs values runs again.
        calls: how many calls of the function mode are under way.
        owned: the storages of parameters, which stay on meta.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.is_eager = False
        self.calls = 0
        self.owned: set[int] = set()
        self._steps: list[Step] = []
        #: A tensor of each storage, so that no address is used again meanwhile.
        self._anchors: dict[int, torch.Tensor] = {}
        self._real = RealStorages()
        #: The tensors that somebody may hold.
        self._holders: dict[int, list[weakref.ref[torch.Tensor]]] = {}
        self._writers: defaultdict[int, list[Step]] = defaultdict(list)
        self._readers: defaultdict[int, list[Step]] = defaultdict(list)
        self._draws = Draws(self.run)

    # ------------------------------------------------------------------ writing

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a view of a storage of the log."""
        return storage_address(tensor) in self._anchors

    def view(self, tensor: torch.Tensor) -> View:
        """How a tensor sees its storage, which becomes part of the log."""
        address = storage_address(tensor)
        assert address is not None
        if address not in self._anchors:
            self._anchors[address] = tensor.detach()
        return View(
            address,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def append(self, step: Step) -> None:
        """Note a step that ran on meta."""
        step.index = self._steps[-1].index + 1 if self._steps else 0
        self._steps.append(step)
        for storage in step.writes:
            self._writers[storage].append(step)
        for storage in step.reads:
            self._readers[storage].append(step)
        if step.generator is not None:
            self._draws.append(step, step.generator)

    def mark(self) -> int:
        """A position to go back to; see `roll_back`."""
        return self._steps[-1].index if self._steps else -1

    def roll_back(self, mark: int) -> None:
        """Forget the steps noted since a mark, except what has run for real."""
        while self._steps and self._steps[-1].index > mark and not self._steps[-1].done:
            step = self._steps.pop()
            self._unlink(step)
            if step.generator is not None:
                self._draws.remove(step)

    def hold(self, tensor: torch.Tensor) -> None:
        """Remember that somebody may hold a tensor, which then becomes real with its storage."""
        address = storage_address(tensor)
        if address not in self._anchors or isinstance(tensor, nn.Parameter):
            return
        assert address is not None
        holders = self._holders.setdefault(address, [])
        if not self.is_held(tensor):
            holders.append(weakref.ref(tensor))

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is known to be held by somebody."""
        holders = self._holders.get(storage_address(tensor) or 0, ())
        return any(reference() is tensor for reference in holders)

    def follow(self, tensor: torch.Tensor, before: View) -> None:
        """Learn that a tensor, which saw one storage, sees another from now on."""
        if before.storage in self.owned:
            self.keep_on_meta(tensor)
        self.hold(tensor)

    def keep_on_meta(self, tensor: torch.Tensor) -> None:
        """Let the storage of a tensor stay on meta, as it is a parameter's."""
        address = storage_address(tensor)
        if address is not None:
            self.owned.add(address)

    def remember(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Take a real value as the content of a new tensor on meta."""
        view = self.view(tensor)
        kept = value.detach().clone()
        dtype = torch.get_default_dtype()
        self.append(Step(torch.clone, (kept,), {}, [view], set(), {view.storage}, dtype))

    # ------------------------------------------------------------------ making real

    def make_all_real(self) -> None:
        """Make real what somebody still holds, except parameters."""
        held = [
            tensor
            for address, holders in list(self._holders.items())
            if address not in self.owned
            for reference in holders
            if (tensor := reference()) is not None
        ]
        self.make_real(held)
        for generator in self._draws.used:  # as a plain build leaves them
            self.catch_up(generator)
        self.put_back()

    def put_back(self) -> None:
        """Leave the generators as they were, where no number was needed of them."""
        self._draws.put_back()

    def make_real(self, tensors: Iterable[torch.Tensor], *, even_owned: bool = False) -> None:
        """Give tensors of the log their values; they stay the same objects.

        So do all others that see the same storages. A parameter stays on meta.

        Args:
            tensors: those outside of the log are left as they are.
            even_owned: of these, also make real what shares its storage with a parameter.
        """
        wanted = [t for t in tensors if t in self and not isinstance(t, nn.Parameter)]
        if not wanted:
            return
        storages = {a for t in wanted if (a := storage_address(t)) is not None}
        with self.at_work():
            if even_owned:
                for tensor in wanted:
                    self.hold(tensor)
            for storage in self._compute(storages):
                if storage not in self.owned or (even_owned and storage in storages):
                    self._hand_out(storage)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor with the values of one of the log; the latter is left as it is."""
        with self.at_work():
            view = self.view(tensor)
            self._compute({view.storage})
            return self._real.tensor(view)

    def catch_up(self, generator: torch.Generator) -> None:
        """Draw what a plain build would have drawn from a generator by now."""
        with self.at_work():
            late = self._draws.late(generator)
            self._compute({storage for step in late for storage in step.writes})
            self._draws.catch_up(generator)

    def at_work(self) -> _AtWork:
        """A context in which operations go straight to torch."""
        return _AtWork(self)

    def _compute(self, storages: set[int]) -> set[int]:
        """Run what storages need; return all those that are real now."""
        steps = self._needed(storages)
        with torch.no_grad():
            for step in sorted(steps, key=lambda s: s.index):
                if not step.done:
                    self._draws.run(step) if step.generator is not None else self.run(step)
        return storages.union(*(step.writes for step in steps))

    def _needed(self, storages: Iterable[int]) -> set[Step]:
        """The steps that the content of some storages comes from.

        A step that reads what a later one of them changes must run before that one. So must all
        that read a storage which is handed out, as the user may change that; unless it is small:
        then they get a copy (`_release`).
        """
        needed: set[Step] = set()
        waiting = set(storages)
        seen: set[int] = set()
        while waiting:
            storage = waiting.pop()
            seen.add(storage)
            writers = self._writers.get(storage, ())
            last = writers[-1].index if writers else -1
            keeps = storage in self.owned or self._bytes(storage) <= MAX_CONSTANT
            readers = [s for s in self._readers.get(storage, ()) if s.index < last or not keeps]
            for step in (*writers, *readers):
                if step in needed:
                    continue
                for one in (step, *self._draws.before(step)):
                    needed.add(one)
                    waiting |= (one.reads | one.writes) - seen
        return needed

    def run(self, step: Step) -> None:
        """Run one step for real; what it reads is there."""
        default = torch.get_default_dtype()
        try:
            if default is not step.default_dtype:
                torch.set_default_dtype(step.default_dtype)
            args, kwargs = map_call(self._real.tensor, step.args, step.kwargs, View)
            results = step.function(*args, **kwargs)
        finally:
            if default is not step.default_dtype:
                torch.set_default_dtype(default)
        step.done = True
        self._unlink(step)
        if any(step.results):
            for view, result in zip(step.results, flat_tensors(results), strict=True):
                if view is not None:
                    self._real.store(view, result, self._bytes(view.storage))

    def _hand_out(self, storage: int) -> None:
        """Let the tensors that see a storage, parameters excepted, be real ones."""
        for reference in self._holders.pop(storage, ()):
            tensor = reference()
            if tensor is None or storage_address(tensor) != storage:
                continue  # it is not referenced any more, or its data has been exchanged since
            view = self.view(tensor)
            real = torch.Tensor._make_subclass(
                type(tensor), self._real.tensor(view), tensor.requires_grad
            )
            real.__dict__.update(tensor.__dict__)
            torch._C._swap_tensor_impl(tensor, real)
        if storage not in self.owned:
            self._release(storage)

    def _release(self, storage: int) -> None:
        """Forget a storage; steps that are still to read it get a copy."""

        def copied(view: View) -> View | torch.Tensor:
            if view.storage != storage:
                return view
            return self._real.tensor(view).clone(memory_format=torch.preserve_format)

        for step in self._readers.pop(storage, ()):
            step.args, step.kwargs = map_call(copied, step.args, step.kwargs, View)
            step.reads.discard(storage)
        self._real.pop(storage, None)
        self._anchors.pop(storage, None)

    def _bytes(self, storage: int) -> int:
        anchor = self._anchors.get(storage)
        return 0 if anchor is None else anchor.untyped_storage().nbytes()

    def _unlink(self, step: Step) -> None:
        for index, storages in ((self._writers, step.writes), (self._readers, step.reads)):
            for storage in storages:
                index[storage].remove(step)
                if not index[storage]:
                    del index[storage]


class _AtWork:
    """Lets operations go straight to torch."""

    def __init__(self, log: Log) -> None:
        self._log, self._was_off = log, log.is_off

    def __enter__(self) -> None:
        self._log.is_off = True

    def __exit__(self, *_error: object) -> None:
        self._log.is_off = self._was_off
