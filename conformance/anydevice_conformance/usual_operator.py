"""What a usual operator is: described as torch describes its own, and made from a few words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from anydevice_conformance.dice import Dice

__all__ = [
    "ALL",
    "BOOLS",
    "CUBE",
    "FLOATS",
    "INTEGERS",
    "NUMBERS",
    "WIDE_FLOATS",
    "Make",
    "Usual",
    "different",
    "numbers",
    "of_shapes",
    "of_sizes",
    "part",
    "rows_by_index",
    "shape",
    "usual",
    "with_specials",
]

#: Makes an operator's arguments, in a dtype.
Make = Callable[[Dice, torch.dtype], Sequence[Any]]

Dtypes = tuple[torch.dtype, ...]

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
#: Those of many digits.
WIDE_FLOATS: Final = (torch.float32, torch.float64)
INTEGERS: Final = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
BOOLS: Final = (torch.bool,)
NUMBERS: Final = (*FLOATS, *INTEGERS)
ALL: Final = (*NUMBERS, *BOOLS)
#: By which small integers become so large that a float's digits are not enough for them.
_FACTORS: Final = {torch.int64: (1 << 54) + 3, torch.int32: (1 << 26) + 3, torch.int16: 3001}


@dataclasses.dataclass
class _Sample:
    """Arguments, as torch's own samples have them."""

    input: Any
    args: Sequence[Any] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def output_process_fn_grad(self, result: Any) -> Any:
        """What gradients are taken of."""
        return result


@dataclasses.dataclass(frozen=True)
class Usual:
    """A usual operator.

    Attributes:
        name: of it.
        run: does it.
        make: its arguments, in a dtype.
        dtypes: that it is tried in.
        supports_out: whether it writes into ``out=``.
        inplace_variant: does it in place; None where nothing does.
        trained: whether a gradient comes back through it.
        calls: how many calls it consists of.
        slow: whether a quick run leaves it out.
        digits: "moved" where each element is the host's, "values" where that of a zero may have
            the other sign, "rounded" where it is as near as one rounding; "" where
            rounding may make more of it, in proportion to the largest.
        every: whether a quick run tries each dtype, too.
    """

    name: str
    run: Callable[..., Any]
    make: Callable[[Dice, torch.dtype], Sequence[Any]]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    supports_out: bool = False
    inplace_variant: Callable[..., Any] | None = None
    trained: bool = False
    variant_test_name: str = ""
    calls: int = 1
    slow: bool = False
    digits: str = ""
    every: bool = False

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Do it."""
        return self.run(*arguments, **options)

    def sample(
        self, dtype: torch.dtype, seed: int, special: bool = False, dtypes: Dtypes = ()
    ) -> _Sample:
        """Arguments, on the host; special where infinities and the like may be among them.

        Args:
            dtype: of the first of them.
            seed: chooses them.
            special: whether infinities and the like may be among them.
            dtypes: that other arguments may have, too.
        """
        first, *others = self.make(Dice(seed, special, dtypes), dtype)
        return _Sample(first, others)


def shape(dice: Dice) -> tuple[int, ...]:
    """One of up to four dimensions, seldom even."""
    small = (7,), (3, 5), (33,), (2, 3, 5), (65, 3), (1,), (1, 17), (), (2, 1, 3, 5)
    return tuple(dice.among(*small, (1031,), (0, 3), (4099,), (3, 2051)))


def part(dice: Dice, size: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that is broadcast to another: some sizes are 1, or the first is left out."""
    found = tuple(dice.among(n, n, 1) for n in size)
    return found[dice.among(0, 0, 1) :]


def numbers(
    dice: Dice, dtype: torch.dtype, *size: int, low: float = -9, high: float = 9
) -> torch.Tensor:
    """Numbers of a dtype from low to below high, those of unsigned ones from 0.

    Where nothing is said of how large they are, those of wide integers are often very large.
    """
    if dtype is torch.bool:
        return torch.rand(size, generator=dice.generator) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.float64 if dtype is torch.float64 else torch.float32  # all of its digits
        plain = torch.rand(size, generator=dice.generator, dtype=wide) * (high - low) + low
        return plain.to(dtype)
    least = max(int(low), 0) if dtype is torch.uint8 else int(low)
    found = dice.integers(least, max(int(high), least + 1), *size)
    if (low, high) == (-9, 9) and dtype in _FACTORS:
        large = _FACTORS[dtype]
        found = found * dice.among(1, 1, large) + dice.among(0, 2 * large, 2 * large)
    return found.to(dtype)


def with_specials(dice: Dice, values: torch.Tensor, *choice: float) -> torch.Tensor:
    """Infinities, NaN and signed zeros in a few places, where the dice are for them.

    Args:
        dice: say whether and where.
        values: changed in place.
        choice: what is put in; everything where nothing is said.
    """
    flat = values.view(-1)
    if dice.special and values.is_floating_point() and len(flat):
        for value in choice or (math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0):
            flat[int(dice.integers(0, len(flat)))] = value
    return values


def different(dice: Dice, dtype: torch.dtype, *size: int) -> torch.Tensor:
    """Whole numbers none of which comes twice, at most 256 for small dtypes."""
    count = torch.Size(size).numel()
    order = torch.randperm(count, generator=dice.generator)
    if dtype is not torch.uint8:
        order -= count // 2
    if dtype in _FACTORS:
        order = order + dice.among(0, 2 * _FACTORS[dtype])
    return order.to(dtype).reshape(size)


def of_sizes(*choices: tuple[int, ...]) -> Make:
    """Numbers of one of some shapes."""
    return lambda dice, dtype: [numbers(dice, dtype, *dice.among(*choices))]


#: Arguments of three dimensions: odd, next to a tile, and long ones.
CUBE: Final = of_sizes((2, 3, 5), (3, 1, 7), (5, 4, 33), (2, 1031, 3))


def of_shapes(*sizes: tuple[int, ...]) -> Make:
    """A tensor of each shape."""
    return lambda dice, dtype: [numbers(dice, dtype, *size, low=-2, high=2) for size in sizes]


def rows_by_index(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A table, numbers of rows of which some come again, and rows."""
    rows, width, count = dice.among(3, 5), dice.among(1, 4, 7), dice.among(0, 6, 6, 33)
    return [
        numbers(dice, dtype, rows, width),
        dice.integers(0, rows, count),
        numbers(dice, dtype, count, width),
    ]


def usual(
    name: str, make: Make, run: Callable[..., Any], *dtypes: torch.dtype, **more: Any
) -> Usual:
    """A usual operator; of floating dtypes and with a gradient where nothing else is said."""
    return Usual(name, run, make, dtypes or FLOATS, trained=more.pop("trained", True), **more)
