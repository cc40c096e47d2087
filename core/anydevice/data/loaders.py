"""Prepared loaders: the user's loader, of the same class, with its process's part of the data.

A prepared loader is a copy of the user's: whatever its class and settings are, they stay. What
changes is the sampler (or, for an iterable data set, the data set), and what happens around a
batch: it is put on the device, and the end is known while the last one is in use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from anydevice.data.active import Iteration
from anydevice.data.iterable import IterableDatasetShard, NotedBatch
from anydevice.data.progress import Progress
from anydevice.data.rounds import Note, Round
from anydevice.data.samplers import BatchSamplerShard
from anydevice.tensors import send_to_device

__all__ = ["DataLoaderShard", "PreparedLoader", "become"]

_PLAIN = (torch.Tensor,)


class PreparedLoader(DataLoader[Any]):
    """What all prepared loaders have in common; made by `prepare_data_loader`, not by hand."""

    #: Where batches are put; None leaves them where they are.
    device: torch.device | None = None
    non_blocking = False
    num_processes = 1
    process_index = 0
    split_batches = False
    even_batches = True
    #: Called on all processes before each epoch.
    synchronize: Callable[[], None] | None = None
    skip_batches = 0
    progress: Progress

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        progress = self.progress
        device, units = self.device, self._units()
        skip = progress.begin(self.skip_batches * units, units)
        self._before_epoch(progress)
        iteration = Iteration(self)
        iteration.begin()
        try:
            for batch, note in self._source(skip):
                if device is not None and not _is_on(batch, device):
                    batch = send_to_device(batch, device, non_blocking=self.non_blocking)
                progress.batches += units
                iteration.hand_out(note.round, note.last)
                yield batch
            progress.finish()
        finally:
            iteration.end()

    def _source(self, skip: int) -> Iterator[tuple[Any, Note]]:
        raise NotImplementedError

    def _own_iter(self) -> Iterator[Any]:
        """The iteration of the user's own kind of loader."""
        return iter(super().__iter__())

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)

    def _units(self) -> int:
        """How many batches of the undivided loader one batch of this one stands for."""
        return 1 if self.split_batches else self.num_processes

    def _before_epoch(self, progress: Progress) -> None:
        if self.synchronize is not None:
            self.synchronize()
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if isinstance(self.dataset, IterableDatasetShard):
            self.dataset.begin_epoch(progress.epoch, progress.told)
        elif progress.told and callable(set_epoch):
            set_epoch(progress.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose which epoch's order the next iteration has; counted on by itself from there."""
        self.progress.set_epoch(epoch)

    def set_even_batches(self, even: bool) -> None:
        """Choose whether samples are repeated until all processes get equally many batches."""
        self.even_batches = even
        for shard in (self.batch_sampler, self.sampler, self.dataset):
            if isinstance(shard, (BatchSamplerShard, IterableDatasetShard)):
                shard.division = shard.division._replace(even=even)

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: the epoch, and the batches that came out in it."""
        return self.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the next iteration go on where ``state_dict`` was taken, on any number of processes.

        Raises:
            OptionError: not a loader's state.
        """
        self.progress.load_state_dict(state_dict)

    @property
    def iteration(self) -> int:
        """Number of the epoch that runs, or comes next."""
        return self.progress.epoch

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the last batch of this loader is out."""
        from anydevice.data.active import active_iterations

        return any(i.last for i in active_iterations() if i.loader is self)

    @property
    def total_batch_size(self) -> int:
        """Samples that all processes together get at once."""
        size = getattr(self.batch_sampler, "batch_size", None) or self.batch_size or 1
        return size if self.split_batches else size * self.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples in the whole data set."""
        whole: Any = getattr(self.dataset, "dataset", self.dataset)
        return len(whole)

    @property
    def remainder(self) -> int:
        """Samples beyond the last full batch of all processes; -1 where that cannot be known."""
        try:
            return self.total_dataset_length % self.total_batch_size
        except TypeError:
            return -1

    def get_sampler(self) -> Any:
        """The sampler of single indices beneath; None where there is none."""
        sampler = self.batch_sampler if self.batch_sampler is not None else self.sampler
        while (inner := getattr(sampler, "batch_sampler", None)) is not None:
            sampler = inner
        return getattr(sampler, "sampler", sampler)


class DataLoaderShard(PreparedLoader):
    """A prepared loader that reads its own part of the data.

    Example:
        >>> from anydevice import prepare_data_loader
        >>> from torch.utils.data import DataLoader
        >>> loader = prepare_data_loader(DataLoader(range(4), batch_size=2))
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    def _source(self, skip: int) -> Iterator[tuple[Any, Note]]:
        if isinstance(self.dataset, IterableDataset):
            return self._from_stream(skip)
        shard: BatchSamplerShard = self._index_sampler
        shard.skip = skip
        shard.begin_epoch(self.progress.seed, self.progress.epoch, self.progress.told)
        return self._with_notes(self._own_iter(), shard)

    @staticmethod
    def _with_notes(batches: Any, shard: BatchSamplerShard) -> Iterator[tuple[Any, Note]]:
        for batch in batches:
            notes = shard.notes  # this iteration's own, which exists once a batch has come
            yield batch, notes.popleft()
            break
        for batch in batches:
            yield batch, notes.popleft()

    def _from_stream(self, skip: int) -> Iterator[tuple[Any, Note]]:
        batches = self._own_iter()
        for _ in range(self._own_batches(skip)):
            if next(batches, _END) is _END:
                return
        held: Any = next(batches, _END)
        while held is not _END:
            coming = next(batches, _END)
            yield _unpack(held, last=coming is _END)
            held = coming

    def _own_batches(self, units: int) -> int:
        from anydevice.errors import OptionError

        own, rest = divmod(units, self._units())
        if rest:
            raise OptionError(
                f"{units} batches of an iterable data set were used when this state was saved: "
                f"{self._units()} processes cannot share them evenly. Go on with a number of "
                "processes that divides them"
            )
        return own


_END = object()


def _unpack(batch: Any, last: bool) -> tuple[Any, Note]:
    round_: Round | None = None
    if isinstance(batch, NotedBatch):
        batch, round_ = batch.data, batch.round
    return batch, Note(round_, last)


def _is_on(batch: Any, device: torch.device) -> bool:
    """Whether a simple batch is on ``device``; False also where looking would take long."""
    kind = type(batch)
    if kind is torch.Tensor:
        return bool(batch.device == device)
    if kind is list or kind is tuple:
        values = batch
    elif kind is dict:
        values = batch.values()
    else:
        return False
    return all(type(value) is torch.Tensor and value.device == device for value in values)


def become(loader: DataLoader[Any], kind: type[PreparedLoader]) -> Any:
    """A copy of ``loader`` whose class is ``kind`` and, beneath it, the loader's own class."""
    base = type(loader)
    if issubclass(base, kind):
        cls = base
    elif base is DataLoader:
        cls = kind
    else:
        cls = type(kind.__name__, (kind, base), {"__module__": kind.__module__})
    made = copy.copy(loader)
    made.__dict__["_iterator"] = None  # workers of the user's own loader stay with it
    object.__setattr__(made, "__class__", cls)
    return made
