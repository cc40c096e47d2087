"""Loaders that only the main process reads: it sends each of the others its batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from anydevice.data.loaders import PreparedLoader
from anydevice.data.rounds import Note, Round
from anydevice.data.samplers import BatchSamplerShard
from anydevice.errors import OptionError
from anydevice.nested import concatenate

__all__ = ["DataLoaderDispatcher", "batch_length", "slice_batch"]


class _Parcel(NamedTuple):
    """What a process is sent in one round.

    ``last``: it gets no batch after this one. ``done``: no rank gets one. ``size`` 0: no batch.
    """

    batch: Any = None
    size: int = 0
    round: Round | None = None
    last: bool = True
    done: bool = True
    failure: str = ""


class DataLoaderDispatcher(PreparedLoader):
    """A prepared loader whose data only the main process reads.

    Each round, every process gets a batch of its own, whose shape and structure may differ from
    the others'. Batches travel through the host. For data that every process can read, a
    `DataLoaderShard` is faster.

    Example:
        >>> from anydevice import prepare_data_loader
        >>> from torch.utils.data import DataLoader
        >>> loader = prepare_data_loader(DataLoader(range(4), batch_size=2), dispatch_batches=True)
        >>> [batch.tolist() for batch in loader]
        [[0, 1], [2, 3]]
    """

    slice_fn: Callable[..., Any] | None = None

    def _source(self, skip: int) -> Iterator[tuple[Any, Note]]:
        rounds: Iterator[Any] = self._read(skip) if self.process_index == 0 else itertools.repeat(0)
        for parcels in rounds:
            mine = self._exchange(parcels)
            if mine.failure:
                raise RuntimeError(
                    f"the main process, which reads the data, failed: {mine.failure}"
                )
            if mine.size:
                yield mine.batch, Note(mine.round, mine.last)
            if mine.done:
                return

    def _exchange(self, parcels: list[_Parcel]) -> _Parcel:
        if self.num_processes == 1:
            return parcels[0]
        received: list[Any] = [None]
        dist.scatter_object_list(received, parcels if self.process_index == 0 else None, src=0)
        parcel: _Parcel = received[0]
        return parcel

    def _read(self, skip: int) -> Iterator[list[_Parcel]]:
        """Each round's parcels; an error while reading reaches all before it is raised here."""
        try:
            yield from self._rounds(skip)
        except Exception as error:
            if self.num_processes > 1:
                failure = f"{type(error).__name__}: {error}"
                self._exchange([_Parcel(failure=failure)] * self.num_processes)
            raise

    def _rounds(self, skip: int) -> Iterator[list[_Parcel]]:
        count, units = self.num_processes, self._units()
        batches = self._batches(skip)

        def take() -> list[Any]:
            group = list(itertools.islice(batches, units))
            return [] if self.drop_last and len(group) < units else group

        first = ahead = take()
        if not ahead:
            yield [_Parcel()] * count
        while ahead:
            pieces, sizes, real = self._divide(ahead, first)
            ahead = take()
            coming = self._divide(ahead, first)[1] if ahead else [0] * count
            irregular = sizes != real or len(set(sizes)) > 1
            note = Round(tuple(sizes), tuple(real)) if irregular else None
            yield [
                _Parcel(piece, size, note, last=not follows, done=not ahead)
                for piece, size, follows in zip(pieces, sizes, coming, strict=True)
            ]

    def _divide(
        self, group: Sequence[Any], first: Sequence[Any]
    ) -> tuple[list[Any], list[int], list[int]]:
        """Each process's batch of a round, its samples, and how many are no repeated ones."""
        count = self.num_processes
        if self.split_batches or self.slice_fn is not None:
            pieces = self._slices(group[0] if len(group) == 1 else concatenate(list(group)))
        else:
            pieces = list(group)
        sizes = [batch_length(piece) for piece in pieces]
        real = sizes + [0] * (count - len(pieces))
        if self.even_batches:
            spare = [b for b in (*pieces, *first) if batch_length(b)]
            for index in range(count):
                if not real[index]:
                    pieces[index : index + 1] = [spare[index % len(spare)]]
        pieces += [None] * (count - len(pieces))
        return pieces, [batch_length(p) if p is not None else 0 for p in pieces], real

    def _slices(self, batch: Any) -> list[Any]:
        count, length = self.num_processes, batch_length(batch)
        size, rest = divmod(length, count)
        ends = list(itertools.accumulate(size + (index < rest) for index in range(count)))
        spans = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        if self.slice_fn is None:
            return [slice_batch(batch, span) for span in spans]
        return [
            self.slice_fn(batch, span, process_index=index, num_processes=count)
            for index, span in enumerate(spans)
        ]

    def _batches(self, skip: int) -> Iterator[Any]:
        sampler = self._index_sampler
        if isinstance(sampler, BatchSamplerShard):
            sampler.skip = skip
            sampler.begin_epoch(self.progress.seed, self.progress.epoch, self.progress.told)
            skip = 0
        return itertools.islice(self._own_iter(), skip, None)

    def __len__(self) -> int:
        batches = super().__len__() + self.skip_batches
        whole, rest = divmod(batches, self._units())
        if self.even_batches or self.split_batches:
            whole += 1 if rest and not self.drop_last else 0
        else:
            whole += 1 if self.process_index < rest and not self.drop_last else 0
        return max(0, whole - self.skip_batches)


def batch_length(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor, else the length of a list.

    Raises:
        OptionError: nothing in it has a length.
    """
    length = _length(batch)
    if length is None:
        raise OptionError(
            f"a batch of type {type(batch).__name__} has neither a tensor with a first dimension "
            "nor a list, so it cannot be divided among processes. Use dispatch_batches=False, or "
            "a collate_fn that gives tensors"
        )
    return length


def _length(batch: Any) -> int | None:
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    if isinstance(batch, Mapping):
        values: Any = batch.values()
    elif isinstance(batch, (list, tuple)):
        values = batch
    else:
        return None
    lengths = (_length(value) for value in values)
    found = next((n for n in lengths if n is not None), None)
    plain = isinstance(batch, (list, tuple)) and found is None
    return len(batch) if plain else found


def slice_batch(batch: Any, span: slice) -> Any:
    """The samples of ``span`` in nested data: rows of its tensors, entries of its plain lists."""
    if isinstance(batch, torch.Tensor):
        return batch[span] if batch.dim() else batch
    if isinstance(batch, Mapping):
        sliced = {key: slice_batch(value, span) for key, value in batch.items()}
        return type(batch)(sliced)  # type: ignore[call-arg]
    if isinstance(batch, (list, tuple)):
        if not any(isinstance(v, (torch.Tensor, Mapping, list, tuple)) for v in batch):
            return batch[span]
        parts = [slice_batch(value, span) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
