"""How the arguments of an operator lie in memory: each layout in turn for each of them."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

import torch

__all__ = ["Deck", "Layouts", "possible"]

T = TypeVar("T")

#: How its arguments lie in memory.
_LAYOUTS: Final[tuple[str, ...]] = (
    "transposed",
    "channels-last",
    "stepped",
    "narrowed",
    "permuted",
)
_CONTIGUOUS: Final = ("contiguous", "contiguous")
#: Of what is only read: the first row, or column, in the place of all.
_READ: Final = ("rows", "columns")
#: Of one where equal elements have no order, or must not be written to one place, none is expanded.
_NEVER_EXPANDED: Final = re.compile(
    r"(arg)?sort|topk|kthvalue|median|(arg|cum)?(max|min)\b|a(max|min)|msort|least|search|index_copy"
    r"|.*cache|orders|cholesky|solve|inverse|eigen|singular|.*pool|put|scatter(?!_add)|.*quantile|unravel"
)
#: Of what the memory may be channels-last.
_IMAGES: Final = re.compile(
    "conv|pool|pad|group_norm|batch_norm|resize|interpolate|upsample|nearest|enlarged"
)
#: Of channels-last memory torch 2.13 on the host crashes where only the weight has a gradient.
_CRASHES: Final = re.compile("group_norm")
#: So many arguments have layouts of their own.
_ARGUMENTS: Final = 4


class Deck(Generic[T]):
    """Deals each of some cards once, in a random order, before one comes again."""

    def __init__(self, dice: random.Random, cards: Sequence[T]) -> None:
        self._dice = dice
        self._cards = list(cards)
        self._left: list[T] = []

    def deal(self) -> T:
        """The next one."""
        if not self._left:
            self._left = self._dice.sample(self._cards, len(self._cards))
        return self._left.pop()


class Layouts:
    """Of an operator's arguments: each has each layout before one comes again."""

    def __init__(self, dice: random.Random, name: str) -> None:
        some = (*_LAYOUTS, *_CONTIGUOUS)
        if _IMAGES.search(name):
            some = (*some, *["channels-last"] * 3)
        self._dice = dice
        self._name = name
        self._decks = [Deck(dice, some) for _ in range(_ARGUMENTS)]

    def deal(self, ways: Sequence[str]) -> tuple[str, ...]:
        """One for each of the first arguments; what is written into is not expanded."""
        found = [deck.deal() for deck in self._decks]
        if "gradient" in ways and _CRASHES.search(self._name):
            found = ["transposed" if one == "channels-last" else one for one in found]
        writes = {"in place", "once more"} & {*ways}
        if not writes and not _NEVER_EXPANDED.match(self._name) and self._dice.random() < 0.3:
            found[self._dice.randrange(3)] = self._dice.choice(_READ)
        return tuple(found)


def possible(layout: str, tensor: torch.Tensor) -> str:
    """The layout, where the tensor can have it."""
    if layout in _READ and (0 in tensor.shape or not tensor.dim()):
        return "contiguous"
    if layout == "channels-last" and tensor.dim() not in (4, 5):
        return "contiguous" if tensor.dim() < 2 else "transposed"
    return "transposed" if layout == "permuted" and tensor.dim() < 3 else layout
