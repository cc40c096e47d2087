"""A log of tensor operations that ran on meta, and running a slice of it for real.

The log is about storages, not about tensors: a step reads some storages and writes others, and a
tensor is a view (dtype, size, stride, offset) of one. Views need no step. The content of a storage
is what its steps, and those of the storages that they read, compute when they run in order. Each
step runs at most once. A step is closed: every tensor in it is a view of a storage of the log, or a
small constant that was copied.

Once code may see the memory of a storage by a real tensor, nothing that is done to it waits: see
`Log.is_late`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from anydevice.init_empty.draws import Draws
from anydevice.init_empty.holders import Holders, swap
from anydevice.init_empty.real_storages import (
    MAX_CONSTANT,
    RealStorages,
    as_inference,
    copied,
    references,
    seen,
)
from anydevice.init_empty.steps import Step, View, flat_tensors, map_call
from anydevice.tensors import storage_address

__all__ = ["Log"]


class Log:
    """The operations of one thread in one context, and what has been made real of them.

    Attributes:
        is_off: operations go straight to torch: the log itself is at work.
        is_eager: operations run for real: a function that needs values runs again.
        calls: how many calls of the function mode are under way.
        has_autocast: one of them is under autocast.
    """

    def __init__(self) -> None:
        self.is_off = False
        self.is_eager = False
        self.calls = 0
        self.has_autocast = False
        self._steps: list[Step] = []
        #: A tensor of each storage, so that no address is used again.
        self._anchors: dict[int, torch.Tensor] = {}
        self._real = RealStorages()
        self._holders = Holders()
        self._shared: set[int] = set()
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
        return View.of(tensor, address)

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
        """Remember that code may hold a tensor, which becomes real with its storage."""
        address = storage_address(tensor)
        if address in self._anchors:
            assert address is not None
            self._holders.add(address, tensor)

    def share(self, tensor: torch.Tensor) -> None:
        """Note that code has the memory of a tensor by other means than a tensor."""
        address = storage_address(tensor)
        if address in self._anchors:
            assert address is not None
            self._shared.add(address)

    def is_late(self, tensor: torch.Tensor) -> bool:
        """Whether what is done to a tensor can wait: code sees its memory by tensors of the log."""
        address = storage_address(tensor)
        if address not in self._anchors:
            return False
        return not (address in self._shared or self._real.is_used(address))

    def is_adopted(self, view: View, real: torch.Tensor) -> bool:
        """Whether a view of a storage of the log sees just what a real tensor sees."""
        address = self._real.address_of(real.untyped_storage())
        return address == view.storage and View.of(real, address) == view

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        """A tensor on meta that stands for a real one on the host; they share memory.

        Values of more than `MAX_CONSTANT` bytes are not kept.
        """
        storage = real.untyped_storage()
        address = self._real.address_of(storage)
        if address is None:
            base = torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]
        else:
            base = self._anchors[address].untyped_storage()
        with self.at_work():
            new = seen(base, View.of(real, 0))
            view = self.view(new)
        if storage.nbytes() <= MAX_CONSTANT:
            self._real[view.storage] = storage
        return new

    # ------------------------------------------------------------------ making real

    def make_all_real(self) -> None:
        """Make real what is still referenced, except parameters."""
        held = [
            tensor
            for address in list(self._holders)
            if not self._holders.have_parameter(address)
            for tensor in self._holders.tensors(address)
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
            for tensor in wanted:
                self.hold(tensor)
            for storage in self._compute(storages):
                if (even_owned and storage in storages) or not self._holders.have_parameter(
                    storage
                ):
                    self._hand_out(storage)

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real tensor that shares the memory of one of the log; the latter is left as it is."""
        with self.at_work():
            view = self.view(tensor)
            self._compute({view.storage})
            self._settle(view.storage)
            with as_inference(tensor.is_inference()):
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
        with torch.no_grad(), torch._C._DisableAutocast():
            for step in sorted(steps, key=lambda s: s.index):
                if not step.done:
                    self._draws.run(step) if step.generator is not None else self.run(step)
        return storages.union(*(step.writes for step in steps))

    def _needed(self, storages: Iterable[int]) -> set[Step]:
        """The steps that the content of some storages comes from.

        A step that reads what a later one of them changes must run before that one. So must all
        that read a storage which code is to see, as it may change that; unless it is small: then
        they get a copy (`_settle`).
        """
        wanted = frozenset(storages)
        needed: set[Step] = set()
        waiting = set(storages)
        seen: set[int] = set()
        while waiting:
            storage = waiting.pop()
            seen.add(storage)
            writers = self._writers.get(storage, ())
            last = writers[-1].index if writers else -1
            keeps = self._bytes(storage) <= MAX_CONSTANT or (
                storage not in wanted and self._holders.have_parameter(storage)
            )
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
        results = step.call(*map_call(self._real.tensor, step.args, step.kwargs, View))
        step.done = True
        self._unlink(step)
        if any(step.results):
            for view, result in zip(step.results, flat_tensors(results), strict=True):
                if view is not None:
                    self._real.store(view, result, self._bytes(view.storage))

    def _hand_out(self, storage: int) -> None:
        """Let the tensors that see a storage, parameters excepted, be real ones."""
        self._settle(storage)
        for tensor in self._holders.tensors(storage):
            with as_inference(tensor.is_inference()):
                swap(tensor, self._real.tensor(self.view(tensor)))
        # What torch holds without a tensor of Python, and parameters, still see the storage.
        if not self._is_seen_elsewhere(storage):
            self._real.forget(storage)
            self._anchors.pop(storage, None)
            self._holders.pop(storage, None)

    def _is_seen_elsewhere(self, storage: int) -> bool:
        anchor = self._anchors.get(storage)
        return anchor is not None and references(anchor.untyped_storage()) > 2  # anchor and handle

    def _settle(self, storage: int) -> None:
        """Give a copy of a storage to the steps that are still to read it."""

        def copy(view: View) -> View | torch.Tensor:
            return copied(self._real.tensor(view)) if view.storage == storage else view

        for step in self._readers.pop(storage, ()):
            step.args, step.kwargs = map_call(copy, step.args, step.kwargs, View)
            step.reads.discard(storage)

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
