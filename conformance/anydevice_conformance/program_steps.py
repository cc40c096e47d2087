"""The steps of random programs over streams, threads and devices."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Final

__all__ = ["Step", "programs", "shorter"]

_USUAL: Final = ("kernel", "in place", "upload", "download", "cross", "record")
_SELDOM: Final = (
    "blocking cross",
    "download, let go",
    "gradient",
    "host waits",
    "let go",
    "let go with its stream",
    "refill",
    "wait for all",
)
_RARE: Final = (
    "blocking download",
    "other members",
    "record a crowd",
    "retire",
    "wait for its own",
)
_KINDS: Final = (*_USUAL * 4, *_SELDOM * 2, *_RARE)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a program: what is done, to which value, on which stream, in what situation."""

    kind: str
    value: int
    stream: int
    situation: int

    def __repr__(self) -> str:
        place = f"{self.kind} value {self.value} on stream {self.stream}"
        return f"{place} in situation {self.situation}" if self.situation else place


#: Values, streams and situations are numbers, taken modulo what there is.
_NUMBERS: Final = 41
_SITUATIONS: Final = (*[0] * 20, *range(1, 16))
_LENGTHS: Final = (5, 12, 40, 60)


def programs(count: int, seed: int) -> Iterator[list[Step]]:
    """So many programs, short and long ones; of a seed they are the same ones."""
    dice = random.Random(seed)
    for number in range(count):
        yield [
            Step(
                dice.choice(_KINDS),
                dice.randrange(_NUMBERS),
                dice.randrange(_NUMBERS),
                dice.choice(_SITUATIONS),
            )
            for _ in range(_LENGTHS[(number + 2) % len(_LENGTHS)])
        ]


def shorter(program: list[Step]) -> Iterator[list[Step]]:
    """Where a program fails, the first of these that fails, too, shows what its end does."""
    for length in range(1, len(program)):
        yield program[:length]
