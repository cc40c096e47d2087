"""Operators with numbers of each kind beside a tensor, and with tensors of another dtype."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    ALL,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Make,
    numbers,
)

__all__ = ["NUMBERS_BESIDE"]

#: Whole and broken ones, of either sign, large, and none: each is exact in each floating dtype.
_KINDS: Final = (2, -3, 2.5, -2.5, -0.5, 0.125, 0, -0.0, True, False, 100, 1 << 20, 1 << 40)
_BEYOND: Final = (math.inf, -math.inf, math.nan)
#: What a kernel may keep in too few digits.
_DECIMALS: Final = (0.1, -0.3, 1e-3, 3.3, 7)


def _halves(dice: Dice, dtype: torch.dtype) -> torch.Tensor:
    """Small numbers of either sign, half of them broken where the dtype has such."""
    size = dice.among((33,), (3, 5), (2, 3, 7))
    if dtype is torch.bool:
        return numbers(dice, dtype, *size)
    values = dice.integers(-8, 9, *size)
    if dtype.is_floating_point:
        return (values / 2).to(dtype)
    return (values.abs() // 2 if dtype is torch.uint8 else values // 2).to(dtype)


def _beside(calls: Iterable[Callable[..., Any]], kinds: tuple[Any, ...], least: float = -9) -> Make:
    """A tensor, and those of the numbers that the host takes beside it, in each of the calls."""
    tried = list(calls)

    def make(dice: Dice, dtype: torch.dtype) -> list[Any]:
        values = _halves(dice, dtype)
        if least > 0:
            values = values.abs() + 1
        kept = [one for one in kinds if _is_held(one, dtype)]
        return [values, [one for one in kept if all(_works(call, values, one) for call in tried)]]

    return make


def _is_held(number: Any, dtype: torch.dtype) -> bool:
    """Whether a floating dtype has the number itself."""
    if not dtype.is_floating_point or number != number:
        return True
    return bool(torch.tensor(number).to(dtype).item() == number)


def _works(call: Callable[..., Any], values: torch.Tensor, number: Any) -> bool:
    with contextlib.suppress(Exception):
        call(values.clone(), number)
        call(values, torch.tensor(number))
        return True
    return False


def _together(results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The results, those of one dtype in one tensor."""
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for one in results:
        found.setdefault(one.dtype, []).append(one)
    return [torch.stack(some) for some in found.values()]


def _each(call: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The call with each number, and with the number as a tensor of the host's or the device's."""
    return (
        lambda x, some: _together(call(x.clone(), one) for one in some),
        lambda x, some: _together(call(x.clone(), torch.tensor(one)) for one in some),
        lambda x, some: _together(call(x.clone(), torch.tensor(one).to(x.device)) for one in some),
    )


def _numbers(name: str, kinds: tuple[Any, ...], *calls: Any, **more: Any) -> Any:
    make = _beside(calls, kinds, more.pop("least", -9))
    return program(name, make, *(one for call in calls for one in _each(call)), **more)


def _others(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A tensor, and one of each other dtype whose common one with it the device has."""
    claimed = [one for one in ALL if one in dice.dtypes and torch.promote_types(one, dtype) in ALL]
    claimed = [one for one in claimed if torch.promote_types(one, dtype) in dice.dtypes]
    x = numbers(dice, dtype, 3, 5, low=0, high=5)
    return [
        x,
        [numbers(dice, one, 3, 5, low=0, high=5) for one in claimed],
        [numbers(dice, one, low=1, high=5) for one in claimed],
    ]


def _lent(function: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    """The function of a tensor and one of another dtype, of as many dimensions and of none."""
    return (
        lambda x, many, alone: _together(function(x, y) for y in many),
        lambda x, many, alone: _together(function(y, x) for y in many),
        lambda x, many, alone: _together(function(x, y) for y in alone),
    )


def _written(x: torch.Tensor, many: Any, alone: Any) -> Any:
    """In place, what the tensor's own dtype has room for."""
    fitting = [y for y in (*many, *alone) if torch.can_cast(y.dtype, x.dtype)]
    changed = [x.clone().add_(y).mul_(y) for y in fitting if x.dtype is not torch.bool]
    return _together([*changed, *(x.clone().copy_(y) for y in (*many, *alone))])


def _into_wider(x: torch.Tensor, many: Any, alone: Any) -> Any:
    """Into an `out=` of each dtype that has room for the result."""
    outs = [
        torch.empty(x.shape, dtype=y.dtype, device=x.device)
        for y in many
        if torch.can_cast(x.dtype, y.dtype)
    ]
    sums = [torch.add(x, x, out=torch.empty_like(out)) for out in outs]
    more = [torch.mul(x, x, out=torch.empty_like(out)) for out in outs]
    return _together([*sums, *more, *(torch.maximum(x, x, out=out) for out in outs)])


def _summed(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """What has no sum in its own digits, and wider dtypes."""
    x = numbers(dice, dtype, 3, dice.among(33, 130, 1031), 5, low=0.5, high=4)
    wide = [one for one in (torch.float32, torch.float64) if one in dice.dtypes]
    return [x, wide if dtype is not torch.float64 else wide[-1:]]


def _into(x: torch.Tensor, wide: Any) -> Any:
    """Sums into an `out=` that says the dtype."""
    shape = (x.shape[0], x.shape[2])
    outs = [torch.empty(shape, dtype=one, device=x.device) for one in wide]
    return [torch.sum(x, 1, dtype=out.dtype, out=out) for out in outs]


#: Tensors with numbers, and with those of other dtypes.
NUMBERS_BESIDE: Final = (
    _numbers(
        "compared with numbers",
        (*_KINDS, *_BEYOND),
        *(torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge),
        dtypes=ALL,
        trained=False,
        every=True,
    ),
    _numbers(
        "computed with numbers",
        (*_KINDS, *_BEYOND),
        *(torch.add, torch.sub, torch.mul),
        lambda x, n: n - x,
        dtypes=NUMBERS,
        trained=False,
        digits="rounded",
        every=True,
    ),
    _numbers(
        "bools with numbers", _KINDS, torch.add, torch.mul, dtypes=(torch.bool,), trained=False
    ),
    _numbers(
        "divided by numbers",
        (2, -3, 2.5, -2.5, 0.125, 100, True),
        torch.div,
        lambda x, n: torch.where(x == 0, n, n / torch.where(x == 0, 1, x)),
        dtypes=NUMBERS,
        trained=False,
        digits="rounded",
        every=True,
    ),
    _numbers(
        "rounded quotients by numbers",
        (2, -3, 2.5, -2.5, 4, -0.5, 100),
        *(torch.floor_divide, torch.remainder, torch.fmod),
        dtypes=(torch.float32, *INTEGERS),
        trained=False,
        digits="values",
    ),
    _numbers(
        "changed in place by numbers",
        (2, -3, 2.5, 0.125, True),
        *(torch.Tensor.add_, torch.Tensor.mul_, torch.Tensor.sub_),
        dtypes=NUMBERS,
        trained=False,
        digits="rounded",
    ),
    _numbers(
        "computed with decimals",
        _DECIMALS,
        *(torch.add, torch.sub, torch.mul, torch.div),
        lambda x, n: n - x,
        dtypes=(torch.float64, torch.float32, *INTEGERS),
        trained=False,
        digits="rounded",
    ),
    _numbers(
        "powers of numbers",
        (2, 3, 0, 1, 0.5, -1, -0.5, -2, 1.5, 0.25, 4),
        torch.pow,
        lambda x, n: torch.pow(n, x) if not isinstance(n, torch.Tensor) and n > 0 else x,
        least=1,
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "tensors of other dtypes",
        _others,
        *(
            call
            for function in (torch.add, torch.mul, torch.maximum, torch.lt, torch.eq)
            for call in _lent(function)
        ),
        *_lent(lambda x, y: torch.where((x > 1).expand(3, 5), x, y)),
        *_lent(lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)])),
        _written,
        _into_wider,
        dtypes=ALL,
        trained=False,
        digits="values",
        every=True,
    ),
    program(
        "sums in another dtype",
        _summed,
        lambda x, wide: [(x.sum(dtype=one), x.sum(1, dtype=one)) for one in wide],
        lambda x, wide: [(x.mean(dtype=one), x.mean((0, 1), dtype=one)) for one in wide],
        lambda x, wide: [(x.cumsum(1, dtype=one), x.cumprod(2, dtype=one)) for one in wide],
        lambda x, wide: [(x.prod(2, dtype=one), x[:, :3].prod(1, dtype=one)) for one in wide],
        lambda x, wide: [x.nansum((1, 2), dtype=one) for one in wide],
        _into,
        dtypes=(*FLOATS, *INTEGERS),
        trained=False,
        every=True,
    ),
    program(
        "functions in another dtype",
        _summed,
        lambda x, wide: [(x.softmax(1, dtype=one), x.log_softmax(1, dtype=one)) for one in wide],
        lambda x, wide: [torch.linalg.vector_norm(x, 2, 1, dtype=one) for one in wide],
        lambda x, wide: [(x.norm(dtype=one), x.norm(1, (0, 1), dtype=one)) for one in wide],
        trained=False,
        every=True,
    ),
)
