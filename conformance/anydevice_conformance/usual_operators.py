"""The operators that most models call, each for every dtype that it takes: one line each."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.operator_digits import DIGITS
from anydevice_conformance.programs_of_elements import ELEMENTS
from anydevice_conformance.programs_of_extremes import EXTREMES
from anydevice_conformance.programs_of_layers import LAYERS_WITH_OPTIONS
from anydevice_conformance.programs_of_moves import MOVES
from anydevice_conformance.programs_of_numbers import NUMBERS_BESIDE
from anydevice_conformance.programs_of_products import PRODUCTS
from anydevice_conformance.programs_of_values import VALUES
from anydevice_conformance.usual_forms import FORMS
from anydevice_conformance.usual_indexing import INDEXING
from anydevice_conformance.usual_layers import LAYERS
from anydevice_conformance.usual_networks import NETWORKS
from anydevice_conformance.usual_operator import (
    ALL,
    BOOLS,
    FLOATS,
    INTEGERS,
    NUMBERS,
    Usual,
    different,
    numbers,
    part,
    shape,
    with_specials,
)
from anydevice_conformance.usual_rarer import RARER

__all__ = ["USUAL"]


#: Of one argument: names, dtypes, and from where to where the numbers are.
_OF_ONE: Final[tuple[tuple[str, tuple[torch.dtype, ...], float, float], ...]] = (
    ("abs neg sign square sgn", NUMBERS, -9, 9),
    ("exp expm1 sin cos tanh sinh sigmoid erf erfc atan asinh exp2", FLOATS, -3, 3),
    ("floor ceil round trunc frac isfinite isinf signbit nan_to_num", FLOATS, -9, 9),
    ("log log2 log10 log1p sqrt rsqrt reciprocal lgamma digamma", FLOATS, 0.3, 9),
    ("asin acos atanh erfinv tan logit", FLOATS, 0.1, 0.9),
    ("acosh", FLOATS, 1.1, 9),
    ("bitwise_not", (*INTEGERS, *BOOLS), -9, 9),
    ("logical_not isnan", ALL, -2, 2),
)
#: Of one argument, and named in `torch.nn.functional`.
_ACTIVATIONS: Final = (
    "relu relu6 gelu silu mish softplus hardswish hardsigmoid hardtanh elu selu celu "
    "leaky_relu logsigmoid softsign tanhshrink hardshrink softshrink"
)
#: Of two arguments, likewise.
_OF_TWO: Final[tuple[tuple[str, tuple[torch.dtype, ...], float, float], ...]] = (
    ("add mul maximum minimum", ALL, -9, 9),
    ("sub fmax fmin", NUMBERS, -9, 9),
    ("div pow xlogy", NUMBERS, 1, 4),
    ("atan2 hypot copysign logaddexp logaddexp2", FLOATS, -4, 4),
    ("eq ne lt le gt ge logical_and logical_or logical_xor", ALL, -2, 3),
    ("bitwise_and bitwise_or bitwise_xor", (*INTEGERS, *BOOLS), -9, 9),
    ("floor_divide remainder fmod", (torch.float32, torch.float64, *INTEGERS), 1, 9),
    ("gcd lcm", INTEGERS, 1, 9),
)
#: Over a dimension, or over all.
_REDUCED: Final[tuple[tuple[str, tuple[torch.dtype, ...]], ...]] = (
    ("sum nansum prod count_nonzero all any", ALL),
    ("mean std var logsumexp norm", FLOATS),
    ("amax amin argmax argmin max min median", NUMBERS),
)
#: Along a dimension.
_ALONG: Final[tuple[tuple[str, tuple[torch.dtype, ...]], ...]] = (
    ("cumsum cumprod", ALL),
    ("softmax log_softmax logcumsumexp", FLOATS),
    ("cummax cummin sort argsort", NUMBERS),
)
#: Which take a number for their second argument.
_WITH_NUMBERS: Final = (
    *("add", "mul", "sub", "div", "pow", "xlogy", "eq", "ne", "lt", "le", "gt", "ge"),
    *("bitwise_and", "bitwise_or", "bitwise_xor", "floor_divide", "remainder", "fmod"),
)
#: Which do not write into ``out=``.
_WITHOUT_OUT: Final = {"isfinite", "isinf", "isnan", "softmax", "log_softmax", "argsort"}
#: Whose results are bools: nobody writes them into their arguments.
_COMPARES: Final = re.compile("logical|eq$|ne$|[lg][te]$")
#: Through which no gradient comes.
_UNTRAINED: Final = re.compile(
    "is|logical|bitwise|signbit|eq$|ne$|[lg][te]$|floor_divide|gcd|lcm|any|all|count|arg"
)
#: Whose answer is one of the values, or its place: no value may come twice.
_PICKING: Final = (
    *("amax", "amin", "argmax", "argmin", "max", "min"),
    *("median", "cummax", "cummin", "sort", "argsort"),
)
#: Whose results overflow where they are of many.
_PRODUCTS: Final = {"prod", "cumprod"}
#: Of these torch does not say what NaN makes.
_OPEN: Final = {"cummax", "cummin", "median"}
#: Whose arguments are not zero, and of either sign.
_SIGNED: Final = {"floor_divide", "remainder", "fmod", "div", "gcd", "lcm"}
#: Whose results are said for infinities, NaN and signed zeros, too.
_SPECIAL: Final = frozenset(
    re.findall(
        r"\w+",
        "abs neg sign square exp tanh sigmoid floor ceil round trunc isfinite isinf isnan signbit "
        "nan_to_num log sqrt reciprocal logical_not add sub mul div maximum minimum fmax fmin "
        "copysign eq ne lt le gt ge logical_and logical_or logical_xor relu relu6 leaky_relu "
        "hardtanh elu softplus sum mean nansum any all softmax log_softmax logsumexp cumsum",
    )
)


def _one(name: str, low: float, high: float) -> Callable[[Dice, torch.dtype], list[Any]]:
    def make(dice: Dice, dtype: torch.dtype) -> list[Any]:
        values = numbers(dice, dtype, *shape(dice), low=low, high=high)
        return [with_specials(dice, values) if name in _SPECIAL else values]

    return make


def _two(name: str, low: float, high: float) -> Callable[[Dice, torch.dtype], list[Any]]:
    """Two tensors of one shape, or with a row, a column, a number, or another dtype.

    A number may be python's, or the host's: a tensor of no dimensions.
    """
    kinds = ["same", "row", "column", "part", "other dtype", "host number"]
    kinds += ["number"] * (name in _WITH_NUMBERS)

    def make(dice: Dice, dtype: torch.dtype) -> list[Any]:
        size = shape(dice)
        first = numbers(dice, dtype, *size, low=low, high=high)
        how = dice.among(*kinds)
        if name in _SPECIAL:
            with_specials(dice, first)
        if how == "host number" and size:
            return [first, _HostNumber(2 if dtype is not torch.bool else True)]
        if how == "number" and name in _WITH_NUMBERS:
            return [first, 2 if dtype is not torch.bool else True]
        other = torch.int64 if how == "other dtype" and dtype is not torch.bool else dtype
        if how == "row":
            size = size[-1:]
        elif how == "column":
            size = (*size[:-1], 1)
        elif how == "part":
            size = part(dice, size)
        second = numbers(dice, other, *size, low=low, high=high)
        if name in _SIGNED:
            first, second = (_signed(dice, one) for one in (first, second))
        return [first, with_specials(dice, second) if name in _SPECIAL else second]

    return make


def _signed(dice: Dice, values: torch.Tensor) -> torch.Tensor:
    """About half of them negative, where the dtype has such."""
    if values.dtype in (torch.uint8, torch.bool):
        return values
    signs = dice.integers(0, 2, *values.shape) * 2 - 1
    return values * signs.to(values.dtype)


@dataclasses.dataclass(frozen=True)
class _HostNumber:
    """A tensor of no dimensions, that stays on the host; it is part of another one."""

    value: int | bool


def _on_the_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which takes a number that stays on the host for its second argument."""

    def run(first: torch.Tensor, second: Any, **options: Any) -> Any:
        if isinstance(second, _HostNumber):
            second = torch.tensor([not second.value, second.value])[1]
        return function(first, second, **options)

    return run


def _over(name: str, along: bool) -> Callable[[Dice, torch.dtype], list[Any]]:
    def make(dice: Dice, dtype: torch.dtype) -> list[Any]:
        long = (1031,), (2050, 2), (2, 4099), (1500, 3)
        small = (7,), (3, 5), (2, 3, 5), (5, 1), (3, 65), (17, 3), (2, 3, 1, 5)
        size = dice.among(*small, *(() if name in _PRODUCTS else long))
        if name in _PICKING:
            size = size if dtype.itemsize > 2 or max(size) < 100 else (3, 65)
            values = different(dice, dtype, *size)
            some = dice.among(math.nan, -math.nan), math.inf, -math.inf
            values = values if name in _OPEN else with_specials(dice, values, *some)
        else:
            values = numbers(dice, dtype, *size, low=-3, high=3)
            values = with_specials(dice, values) if name in _SPECIAL else values
        if along:
            return [values, int(dice.integers(-len(size), len(size)))]
        if name == "norm":
            return [values, dice.among(1, 2, 3.0), dice.among(0, -1)]
        how = dice.among("all", "one", "kept")
        if how == "all" and name != "logsumexp":
            return [values]
        if name == "count_nonzero" or how == "one":
            return [values, int(dice.integers(-len(size), len(size)))]
        return [values, int(dice.integers(-len(size), len(size))), _KEPT]

    return make


_KEPT: Final = "keepdim"


def _reduce(function: Callable[..., Any]) -> Callable[..., Any]:
    """So called that the last argument may ask for `keepdim`: functions take it in other places."""

    def run(*arguments: Any, **options: Any) -> Any:
        if arguments[-1] is _KEPT:
            return function(*arguments[:-1], keepdim=True, **options)
        return function(*arguments, **options)

    return run


def _plain(name: str, dtypes: tuple[torch.dtype, ...], make: Any) -> Usual:
    return Usual(
        name,
        getattr(torch, name),
        make,
        dtypes,
        supports_out=name not in _WITHOUT_OUT,
        inplace_variant=None if _COMPARES.match(name) else getattr(torch.Tensor, f"{name}_", None),
        trained=not _UNTRAINED.match(name),
    )


def _all() -> Iterator[Usual]:
    for one in _named():
        yield dataclasses.replace(one, digits=one.digits or DIGITS.get(one.name, ""))


def _named() -> Iterator[Usual]:
    for names, dtypes, low, high in _OF_ONE:
        yield from (_plain(name, dtypes, _one(name, low, high)) for name in names.split())
    for names, dtypes, low, high in _OF_TWO:
        for name in names.split():
            found = _plain(name, dtypes, _two(name, low, high))
            inplace = found.inplace_variant
            yield dataclasses.replace(
                found,
                run=_on_the_host(found.run),
                inplace_variant=_on_the_host(inplace) if inplace is not None else None,
            )
    for name in _ACTIVATIONS.split():
        yield Usual(name, getattr(F, name), _one(name, -4, 4), trained=True)
    for names, dtypes in _REDUCED:
        for name in names.split():
            run = _reduce(getattr(torch, name))
            trained = not _UNTRAINED.match(name)
            yield Usual(name, run, _over(name, False), dtypes, trained=trained)
    for names, dtypes in _ALONG:
        for name in names.split():
            run = getattr(torch, name)
            out, trained = name not in _WITHOUT_OUT, not _UNTRAINED.match(name)
            yield Usual(name, run, _over(name, True), dtypes, supports_out=out, trained=trained)
    yield from INDEXING
    yield from LAYERS
    yield from RARER
    yield from FORMS
    yield from NETWORKS
    yield from PRODUCTS
    yield from LAYERS_WITH_OPTIONS
    yield from ELEMENTS
    yield from MOVES
    yield from VALUES
    yield from NUMBERS_BESIDE
    yield from EXTREMES


#: All of them.
USUAL: Final = tuple(_all())
