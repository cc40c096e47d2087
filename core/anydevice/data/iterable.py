"""Iterable data sets among several processes: each reads the stream and keeps its own part.

What is odd about a round (samples repeated to make it even) is known where the stream ends, which
may be in a worker process: a note travels to the loader with the samples of that round.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from anydevice.data.rounds import Division, Note, Round

__all__ = ["IterableDatasetShard", "NotedBatch", "NotingCollate"]


class _NotedSample(NamedTuple):
    sample: Any
    round: Round


class NotedBatch:
    """A collated batch and the note of its round, on their way out of a worker."""

    def __init__(self, data: Any, round_: Round) -> None:
        self.data = data
        self.round = round_

    def pin_memory(self) -> NotedBatch:
        """Pin the batch; called by torch's pinning thread."""
        from torch.utils.data._utils.pin_memory import pin_memory

        self.data = pin_memory(self.data)  # type: ignore[no-untyped-call]
        return self


class NotingCollate:
    """A loader's ``collate_fn`` for samples of which some carry a note."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        """Collate; the note of noted samples goes with the batch."""
        if isinstance(samples, _NotedSample):
            return NotedBatch(self.collate(samples.sample), samples.round)
        if isinstance(samples, list) and samples and isinstance(samples[0], _NotedSample):
            return NotedBatch(self.collate([s.sample for s in samples]), samples[0].round)
        return self.collate(samples)


class IterableDatasetShard(IterableDataset[Any]):
    """One process's samples of an iterable data set.

    Every process iterates the same stream; with several workers, each worker its own part of it.
    A stream in random order must be in the same order everywhere: ``set_epoch`` is passed on, and
    a generator in the data set's ``generator`` is seeded with its first seed plus the epoch.

    Args:
        dataset: the whole data set.
        batch_size: samples in a batch of the loader; None where each item is a batch.
        drop_last: leave out what does not suffice for all processes.
        num_processes: among how many processes it is divided.
        process_index: whose samples this gives.
        split_batches: ``batch_size`` counts the samples of all processes together.
        even_batches: repeat samples from the beginning until all have equally many full batches.

    Raises:
        OptionError: the batch size cannot be split evenly.

    Example:
        >>> from anydevice.data_loader import IterableDatasetShard
        >>> stream = IterableDatasetShard(range(6), batch_size=2, num_processes=2, process_index=1)
        >>> [getattr(item, "sample", item) for item in stream]
        [2, 3, 0, 1]
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.process_index = process_index
        self.division = Division(
            processes=num_processes,
            split=split_batches and batch_size is not None,
            even=even_batches,
            drop_last=drop_last,
            size=batch_size,
            items=batch_size is None,
        ).check()
        generator = getattr(dataset, "generator", None)
        self._seed = generator.initial_seed() if isinstance(generator, torch.Generator) else None

    def __iter__(self) -> Iterator[Any]:
        notes: deque[Note] = deque()
        for batch in self.division.stream(self._batches(), self.process_index, notes):
            round_ = notes.popleft().round
            samples = [batch] if self.batch_size is None else batch
            if round_ is None:
                yield from samples
            else:
                yield from (_NotedSample(sample, round_) for sample in samples)

    def __len__(self) -> int:
        """Samples that this process gets, where the data set knows its own length."""
        total = len(self.dataset)
        size = self.batch_size or 1
        whole, rest = divmod(total, size)
        batches = whole + (1 if rest and not self.division.drop_last else 0)
        share = self.division.share or 1
        return self.division.length(batches, self.process_index) * share

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch`` where the data set has one."""
        self.begin_epoch(epoch, told=True)

    def begin_epoch(self, epoch: int, told: bool) -> None:
        """Seed the generator for an epoch; tell the data set its number if the user names it."""
        set_epoch = getattr(self.dataset, "set_epoch", None)
        if told and callable(set_epoch):
            set_epoch(epoch)
        if self._seed is not None:
            self.dataset.generator.manual_seed((self._seed + epoch) % (1 << 63))

    def _batches(self) -> Iterator[Any]:
        samples = iter(self.dataset)
        if self.batch_size is None:
            yield from samples
            return
        while batch := list(itertools.islice(samples, self.batch_size)):
            if len(batch) < self.batch_size and self.division.drop_last:
                return
            yield batch
