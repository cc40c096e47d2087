"""Few situations that hold each pair of what a situation is made of.

Most faults that depend on the situation depend on one or two of its parts (in a thread; on device 1
while another one is current). So all pairs are tried, where all combinations are too many.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

from anydevice_conformance.situations import Situation, parts_of_situations
from anydevice_conformance.subject import Subject

__all__ = ["covering_situations", "simpler"]

#: So many rows are drawn for each one that is taken: the one with the most new pairs.
_DRAWS: Final = 40


def covering_situations(subject: Subject) -> list[Situation]:
    """Situations among which each pair of parts comes; the same ones for the same seed.

    Of many devices the first, the last and one between stand for all.
    """
    kept: list[Situation] | None = subject.__dict__.get("_covering_situations")
    if kept is None:
        dice, parts = random.Random(subject.seed), parts_of_situations(subject)
        for name in ("index", "current"):
            every = parts[name]
            parts[name] = sorted({every[0], dice.choice(every), every[-1]})
        rows = _rows(list(parts.values()), dice)
        kept = [Situation(**dict(zip(parts, row, strict=True))) for row in rows]
        subject.__dict__["_covering_situations"] = kept
    return kept


def _rows(columns: Sequence[Sequence[Any]], dice: random.Random) -> Iterator[tuple[Any, ...]]:
    """Rows of one value of each column, until each pair of values of two columns has come."""
    left = dict.fromkeys(
        (one, a, other, b)
        for one, other in itertools.combinations(range(len(columns)), 2)
        for a in columns[one]
        for b in columns[other]
    )
    while left:
        one, a, other, b = next(iter(left))
        drawn = [[dice.choice(column) for column in columns] for _ in range(_DRAWS)]
        for row in drawn:
            row[one], row[other] = a, b
        best = max(drawn, key=lambda row: sum(pair in left for pair in _pairs(row)))
        for pair in _pairs(best):
            left.pop(pair, None)
        yield tuple(best)


def _pairs(row: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    return {
        (one, row[one], other, row[other])
        for one, other in itertools.combinations(range(len(row)), 2)
    }


def simpler(subject: Subject, situation: Situation) -> Iterator[Situation]:
    """Of a situation, ones with fewer parts that are out of the ordinary; the plainest first."""
    parts = parts_of_situations(subject)
    odd = [name for name in parts if getattr(situation, name) != parts[name][0]]
    for count in range(len(odd)):
        for names in itertools.combinations(odd, count):
            yield Situation(**{name: getattr(situation, name) for name in names})
