"""What the sweeps move: each layout in each number of dimensions, small and of some thousands."""

from __future__ import annotations

import random
from typing import Final

from anydevice_conformance.layouts import LAYOUTS

__all__ = ["SMALL_STORAGE", "Case", "small_cases"]

#: Shape, layout, and how many elements lie before it in its storage.
Case = tuple[tuple[int, ...], str, int]

#: Elements that hold each of the cases, whatever its layout.
SMALL_STORAGE: Final = 18_000
#: For each number of dimensions, small shapes and one of some thousands of elements.
_SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    *((), (7,), (4099,)),
    *((5, 8), (3, 1), (67, 61)),
    *((3, 4, 5), (1, 3, 2), (11, 17, 19)),
    *((2, 3, 4, 5), (3, 7, 11, 13)),
    *((2, 3, 1, 2, 4), (3, 5, 7, 5, 7)),
    *((3, 2, 2, 1, 2, 3), (3, 4, 5, 4, 5, 3)),
)
_ALWAYS: Final[tuple[Case, ...]] = (
    ((), "contiguous", 5),
    ((1,), "contiguous", 0),
    ((0, 3), "contiguous", 0),
    ((65,), "contiguous", 0),
    ((4097,), "contiguous", 1),
    ((2, 3, 4, 5), "channels-last", 0),
)


def small_cases(number: int, seed: int) -> tuple[Case, ...]:
    """One case of each layout, and some that always come.

    With consecutive numbers each layout comes in each of its shapes.

    Args:
        number: which of the turns, such as of a dtype.
        seed: of the order in which the shapes come.
    """
    dice = random.Random(f"{seed} {number}")
    return (*_ALWAYS, *(_of(layout, number, seed, dice) for layout in LAYOUTS))


def _of(layout: str, number: int, seed: int, dice: random.Random) -> Case:
    shapes = [shape for shape in _SHAPES if LAYOUTS[layout](shape) is not None]
    random.Random(f"{seed} {layout}").shuffle(shapes)
    return shapes[number % len(shapes)], layout, dice.choice((0, 0, 1, 2, 3, 16))
