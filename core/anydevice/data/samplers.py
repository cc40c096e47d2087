"""Samplers: shuffling that depends on a seed and the epoch only, and dividing among processes.

A sampler of torch gets a generator of its own. Any other is the user's: it is wrapped as it is, and
runs with the global generators seeded from the seed and the epoch, which are put back after
each batch. So what it gives is the same on every process and after every restart, whatever the
training loop drew in between.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from anydevice.data.rounds import Division, Note
from anydevice.data.seeding import epoch_generator, seeded

__all__ = [
    "BatchSamplerShard",
    "SeedableRandomSampler",
    "SkipBatchSampler",
    "own_generator",
    "sampler_seed",
]

#: torch's own random samplers, by exact type: nothing is known of what a subclass does.
_RANDOM = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class SeedableRandomSampler(RandomSampler):
    """A `RandomSampler` whose order is a function of a seed and the epoch.

    Epoch ``e`` has the order of a `RandomSampler` whose generator was seeded with ``seed + e``.

    Args:
        *args, **kwargs: those of `torch.utils.data.RandomSampler`.
        data_seed: the seed; None takes the generator's first seed, or torch's.

    Example:
        >>> from anydevice.data_loader import SeedableRandomSampler
        >>> sampler = SeedableRandomSampler(range(4), data_seed=7)
        >>> sampler.set_epoch(3)
        >>> list(sampler) == list(sampler)
        True
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if data_seed is None:
            data_seed = sampler_seed(self)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator = epoch_generator(self.initial_seed, self.epoch)
        return super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch`` for the next iterations."""
        self.epoch = epoch


class BatchSamplerShard(BatchSampler):
    """One process's batches of a batch sampler.

    Args:
        batch_sampler: any iterable of lists of indices; or of indices, with ``items``.
        num_processes: among how many processes its batches are divided.
        process_index: whose batches this gives.
        split_batches: cut each batch into parts, rather than giving whole batches in turn.
        even_batches: repeat samples from the beginning until all have equally many full batches.
        items: the sampler gives single indices, each of which is handed out as a batch.
        seed: what a sampler that draws from the global generators is seeded with.

    Raises:
        OptionError: the batch size cannot be split evenly.

    Example:
        >>> from torch.utils.data import BatchSampler
        >>> from anydevice.data_loader import BatchSamplerShard
        >>> batches = BatchSampler(range(6), batch_size=2, drop_last=False)
        >>> list(BatchSamplerShard(batches, num_processes=2, process_index=1))
        [[2, 3], [0, 1]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
        *,
        items: bool = False,
        seed: int = 0,
    ) -> None:
        exact = type(batch_sampler) is BatchSampler
        self.batch_sampler = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.process_index = process_index
        self.seed = seed
        #: Batches of the sampler that the next iteration leaves out at its beginning.
        self.skip = 0
        self.epoch = 0
        self.division = Division(
            processes=num_processes,
            split=split_batches,
            even=even_batches,
            drop_last=self.drop_last,
            size=self.batch_size if exact else None,
            items=items,
        ).check()
        #: The notes of the iteration that was begun last, see `Division.stream`.
        self.notes: deque[Note] = deque()
        self._draws_globally = not _own_randomness(batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        self.notes = deque()
        batches: Iterable[Any] = self.batch_sampler
        if self._draws_globally:
            batches = seeded(self.batch_sampler, self.seed + self.epoch)
        return self.division.stream(batches, self.process_index, self.notes, self.skip)

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        try:
            samples = None if self.drop_last or self.sampler is None else len(self.sampler)
        except TypeError:
            samples = None
        return self.division.length(batches, self.process_index, samples if batches else None)

    @property
    def total_length(self) -> int:
        """Batches of the undivided sampler."""
        return len(self.batch_sampler)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of ``epoch``, also in the samplers beneath that know epochs."""
        self.begin_epoch(self.seed, epoch, told=True)

    def begin_epoch(self, seed: int, epoch: int, told: bool) -> None:
        """Choose seed and epoch of our own samplers; name the epoch to the user's too if told."""
        self.seed, self.epoch = seed, epoch
        for sampler in _within(self.batch_sampler):
            if type(sampler) in (SeedableRandomSampler, _OwnGenerator):
                sampler.initial_seed = seed
                sampler.set_epoch(epoch)
            elif told and callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches: their indices are skipped, no sample is read.

    Args:
        batch_sampler: any iterable of lists of indices.
        skip_batches: how many to leave out.

    Example:
        >>> from torch.utils.data import BatchSampler, SequentialSampler
        >>> from anydevice.data_loader import SkipBatchSampler
        >>> batches = BatchSampler(SequentialSampler(range(6)), batch_size=2, drop_last=False)
        >>> list(SkipBatchSampler(batches, skip_batches=2))
        [[4, 5]]
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[list[int]]:
        for number, batch in enumerate(self.batch_sampler):
            if number >= self.skip_batches:
                yield batch

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    @property
    def total_length(self) -> int:
        """Batches with those that are skipped."""
        return len(self.batch_sampler)


class _OwnGenerator(Sampler[int]):
    """A random sampler of torch, a copy of the user's, reseeded for each epoch."""

    def __init__(self, sampler: Any, seed: int) -> None:
        self.base = copy.copy(sampler)
        self.initial_seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.base.generator = epoch_generator(self.initial_seed, self.epoch)
        return iter(self.base)

    def __len__(self) -> int:
        return len(self.base)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def own_generator(sampler: Any, seed: int) -> Any:
    """A sampler of torch made a function of ``seed`` and epoch; any other as it is."""
    if type(sampler) is RandomSampler:
        return SeedableRandomSampler(
            sampler.data_source,
            replacement=sampler.replacement,
            num_samples=sampler._num_samples,
            data_seed=seed,
        )
    return _OwnGenerator(sampler, seed) if type(sampler) in _RANDOM else sampler


def sampler_seed(sampler: Any) -> int | None:
    """The seed that the user gave a sampler with its generator; None without one."""
    seed = getattr(sampler, "initial_seed", None)
    if isinstance(seed, int):
        return seed
    generator = getattr(sampler, "generator", None)
    return generator.initial_seed() if isinstance(generator, torch.Generator) else None


def _within(sampler: Any) -> Iterator[Any]:
    """A sampler and all those beneath it."""
    seen: set[int] = set()
    while sampler is not None and id(sampler) not in seen:
        seen.add(id(sampler))
        yield sampler
        inner = getattr(sampler, "batch_sampler", None)
        sampler = getattr(sampler, "sampler", None) if inner is None else inner


def _own_randomness(batch_sampler: Any) -> bool:
    """Whether nothing in a batch sampler can draw from the global generators."""
    kinds = (SequentialSampler, SeedableRandomSampler, _OwnGenerator)
    if type(batch_sampler) in (BatchSampler, SkipBatchSampler):
        inner = getattr(batch_sampler, "batch_sampler", None)
        return _own_randomness(inner if inner is not None else batch_sampler.sampler)
    return type(batch_sampler) in (*kinds, range, list, tuple)
