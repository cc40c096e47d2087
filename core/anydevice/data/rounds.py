"""Dividing batches among processes, in rounds: one round gives every process its batch.

Sharding and its bookkeeping work on whatever a batch sampler gives: no sample is read here. Every
process goes through all rounds and knows what the others get, so that nothing has to be told.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from anydevice.errors import OptionError

__all__ = ["Division", "Note", "Round"]


class Round(NamedTuple):
    """What each process gets in one round, in samples.

    Attributes:
        sizes: samples in each process's batch, those repeated included; 0 where there is none.
        real: how many of these, from the first, are not repeated ones.
    """

    sizes: tuple[int, ...]
    real: tuple[int, ...]


class Note(NamedTuple):
    """What a loader has to know of a batch besides its samples.

    Attributes:
        round: None where all processes got equally many samples and none was repeated.
        last: whether this process gets no further batch in this epoch.
    """

    round: Round | None
    last: bool


_REGULAR = Note(None, last=False)
_LAST = Note(None, last=True)


class Division(NamedTuple):
    """How the batches of a sampler are divided.

    Attributes:
        processes: among how many.
        split: each batch is cut into parts; else each process gets whole batches in turn.
        even: samples are repeated from the beginning so that all get equally many batches.
        drop_last: what does not suffice for all processes is left out.
        size: samples in a full batch of the sampler; None where that is not fixed.
        items: what is divided are single items, each of which is handed out as a batch.
    """

    processes: int = 1
    split: bool = False
    even: bool = True
    drop_last: bool = False
    size: int | None = None
    items: bool = False

    def check(self) -> Division:
        """Return self.

        Raises:
            OptionError: a batch cannot be split evenly.
        """
        if self.split and self.size is not None and self.size % self.processes:
            raise OptionError(
                f"split_batches=True needs a batch size that {self.processes} processes can share "
                f"evenly: {self.size} is no multiple of {self.processes}. Choose another batch "
                "size, or split_batches=False"
            )
        return self

    @property
    def share(self) -> int | None:
        """Samples in one process's full batch; None where that is not fixed."""
        if self.size is None:
            return None
        return self.size // self.processes if self.split else self.size

    @property
    def per_round(self) -> int:
        """Batches of the sampler that one round takes."""
        return 1 if self.split else self.processes

    def length(self, batches: int, process: int, samples: int | None = None) -> int:
        """How many batches ``process`` gets of ``batches`` batches of the sampler.

        ``samples``, in all of them, tells whether the last batch reaches as far as ``process``.
        """
        if self.processes == 1:
            return batches
        if self.split:
            if self.even or not samples or not self.size or not samples % self.size:
                return batches
            return batches if samples % self.size > process * (self.share or 1) else batches - 1
        whole, rest = divmod(batches, self.processes)
        if self.drop_last or not rest:
            return whole
        return whole + (1 if self.even or process < rest else 0)

    def stream(
        self, batches: Iterable[Any], process: int, notes: deque[Note], skip: int = 0
    ) -> Iterator[Any]:
        """Give the batches of ``process``; for each, a note is put into ``notes`` before.

        Args:
            batches: those of the sampler, from the epoch's beginning.
            process: whose batches to give.
            notes: is appended to, in the order of the batches.
            skip: batches of the sampler that are left out at the beginning.
        """
        held: Any = None
        note: Round | None = None
        holding = False
        for pieces, kept in self._rounds(iter(batches), skip):
            mine = pieces[process]
            if mine is None:
                continue
            if holding:
                notes.append(_REGULAR if note is None else Note(note, last=False))
                yield held
            held, note, holding = mine, kept, True
        if holding:
            notes.append(_LAST if note is None else Note(note, last=True))
            yield held

    def _rounds(
        self, batches: Iterator[Any], skip: int
    ) -> Iterator[tuple[Sequence[Any], Round | None]]:
        """Each round's batches, None for a process that gets none, and what is odd about it."""
        count = self.processes
        if count == 1:
            for batch in itertools.islice(batches, skip, None):
                yield (batch,), None
            return
        first = list(itertools.islice(batches, self.per_round))
        batches = itertools.islice(itertools.chain(first, batches), skip, None)
        share = self.share
        measure = (lambda _item: 1) if self.items else len
        while group := list(itertools.islice(batches, self.per_round)):
            if len(group) < self.per_round and self.drop_last:
                return
            pieces = self._cut(group[0]) if self.split else group
            sizes = [measure(piece) for piece in pieces]
            if len(pieces) == count and (
                sizes.count(share) == count if share else sizes.count(sizes[0]) == count
            ):
                yield pieces, None
            else:
                yield self._complete(pieces, sizes, first)

    def _cut(self, batch: Any) -> list[Any]:
        step = self.share or -(-len(batch) // self.processes)
        return [batch[i * step : (i + 1) * step] for i in range(self.processes)]

    def _complete(
        self, pieces: list[Any], sizes: list[int], first: list[Any]
    ) -> tuple[list[Any], Round]:
        """Fill an irregular round up with samples of the epoch's first batches, if it is to be."""
        missing = self.processes - len(pieces)
        real = (*sizes, *[0] * missing)
        if not self.even:
            kept = [piece if size else None for piece, size in zip(pieces, sizes, strict=True)]
            return kept + [None] * missing, Round(real, real)
        if self.items or (self.size is None and not self.split):  # a batch is repeated whole
            extra = [first[i % len(first)] for i in range(missing)]
            filled = [1] * missing if self.items else [len(batch) for batch in extra]
            return [*pieces, *extra], Round((*sizes, *filled), real)
        target = self.share or max(real)
        samples = itertools.cycle([sample for batch in first for sample in batch])
        full = [
            [*piece, *itertools.islice(samples, max(0, target - len(piece)))]
            for piece in [*pieces, *[()] * missing]
        ]
        return full, Round(tuple(len(piece) for piece in full), real)
