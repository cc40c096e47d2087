"""Operators where their arguments end: of functions and of shapes, of long rows and far places."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import FLOATS, INTEGERS, NUMBERS, numbers

__all__ = ["EXTREMES"]

#: What has a limit of its own at zero, at one, or at infinity.
_LIMITS: Final = (
    "exp expm1 exp2 log log2 log10 log1p sqrt rsqrt reciprocal square sin cos tanh sinh cosh asin "
    "acos atan asinh acosh atanh erf erfc sigmoid sign"
)


def _ends(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Zeros, ones, infinities and NaN, each of either sign, in some order; each beside each."""
    ends = [0.0, 1, math.inf, math.nan, 2, 0.5, 3]
    values = torch.tensor([*ends, *(-one for one in ends)]).to(dtype)
    values = values[torch.randperm(len(values), generator=dice.generator)]
    return [values, values[:, None].repeat(1, len(values)), values.repeat(len(values), 1)]


def _limit(name: str) -> Callable[..., Any]:
    return lambda x, a, b: getattr(torch, name)(x)


def _signed(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Whole numbers of either sign, and how far to shift them."""
    low = 0 if dtype is torch.uint8 else torch.iinfo(dtype).min
    high = torch.iinfo(dtype).max
    values = dice.integers(max(low, -(1 << 62)), min(high, 1 << 62), 66)
    values[:2] = torch.tensor([low, high])
    return [values.to(dtype), dice.integers(0, dtype.itemsize * 8 - 1, 66).to(dtype)]


def _hidden(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Rows of which some are -inf alone, or infinite in places."""
    x = numbers(dice, dtype, 5, dice.among(1, 7, 33), low=-3, high=3)
    x[1] = -math.inf
    x[2, 0] = math.inf
    x[3, :-1] = -math.inf
    return [x]


def _single(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A column, and pictures of one place."""
    return [numbers(dice, dtype, 3, 1), numbers(dice, dtype, 3, 2, 1, 1)]


def _far(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A long table, and places all over it: also at its end."""
    rows = 66_001
    places = dice.integers(0, rows, 33)
    places[:4] = torch.tensor([rows - 1, 32_768, 65_536, 40_000])
    table = (torch.arange(rows * 2).view(rows, 2) % 251).to(dtype)
    return [table, torch.tensor(sorted({*places.tolist()}))]


def _written(x: torch.Tensor, i: torch.Tensor) -> Any:
    y = x[: len(i)] * 0 + 3
    found = [x.index_add(0, i, y), x.index_copy(0, i, y), x.index_fill(0, i, 5)]
    found += [x.scatter(0, i[:, None].expand(-1, 2), y), x.index_put((i,), y)]
    return [one[i - 1] for one in found] + [one[i] for one in found]


def _equals(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Rows in which the largest and the least come several times."""
    return [numbers(dice, dtype, 5, dice.among(9, 33, 1031), low=0, high=4).round()]


def _long(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """More than 65,536 elements, of which those behind weigh more."""
    x = numbers(dice, dtype, 66_001, low=0.1, high=0.4)
    x[-400:] = 2
    return [x, x.view(1, -1).repeat(2, 1)]


def _heads(dice: Dice, dtype: torch.dtype) -> list[Any]:
    q, k = dice.among(3, 17), dice.among(5, 33)
    sizes = (2, 4, q, 16), (2, 2, k, 16), (2, 2, k, 16), (2, 1, q, k)
    found = [numbers(dice, dtype, *size, low=-2, high=2) for size in sizes]
    return [*found, torch.rand(2, 1, q, k, generator=dice.generator) > 0.3]


def _attends(kind: str, scale: float | None, grouped: bool) -> Callable[..., Any]:
    """Attention with some of its options together."""

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, b: Any, m: Any) -> torch.Tensor:
        m = m.clone()
        m[..., 0] = True
        options: dict[str, Any] = {"none": {}, "causal": {"is_causal": True}}.get(
            kind, {"attn_mask": b if kind == "bias" else m}
        )
        if not grouped:
            q = q[:, :2]
        if grouped:
            options["enable_gqa"] = True
        return F.scaled_dot_product_attention(q, k, v, scale=scale, **options)

    return run


#: Where arguments end.
EXTREMES: Final = (
    program(
        "limits of functions",
        _ends,
        *map(_limit, _LIMITS.split()),
        lambda x, a, b: [x.pow(n) for n in (0, 1, 2, 3, -1, -2, 0.5, -0.5)],
        lambda x, a, b: (a.pow(b), a.fmod(b), a.atan2(b), a.copysign(b)),
        lambda x, a, b: (a / b, a * b, a + b, a - b, a.logaddexp(b), a.remainder(b)),
        lambda x, a, b: (a < b, a >= b, a == b, a.isclose(b, equal_nan=True), a.fmax(b)),
        dtypes=FLOATS[:3],
        trained=False,
        every=True,
    ),
    program(
        "shifts of negative numbers",
        _signed,
        lambda x, n: [x >> one for one in (1, 3, 4, 7)],
        lambda x, n: (x >> n, x << n, (x << 4) >> 4, torch.bitwise_right_shift(x, n), -1 & x),
        lambda x, n: (x & 15, x | 8, x ^ n, ~x, x // 16, x % 16, x.abs() & 7),
        dtypes=INTEGERS,
        trained=False,
        every=True,
    ),
    program(
        "rows that are hidden",
        _hidden,
        lambda x: (x.logsumexp(-1), x.logsumexp((0, 1)), x.T.logsumexp(0), x.logcumsumexp(-1)),
        lambda x: (x.softmax(-1), x.log_softmax(-1), x.logaddexp(x[1]), x.softmax(0)),
        lambda x: (x.amax(-1), x.max(-1).values, x.sum(-1), x.mean(-1), x.exp().sum(-1)),
        lambda x: (x.cumsum(-1), x.var(-1), x.norm(dim=-1), x.prod(-1), x.cummax(-1).values),
        trained=False,
        every=True,
    ),
    program(
        "reductions of one",
        _single,
        lambda x, p: (x.var(-1), x.std(-1), x.var(-1, correction=0), *torch.var_mean(x, 1)),
        lambda x, p: (x[0].var(), x[0].std(), x[:1].var((0, 1)), x[0, 0].var(correction=0)),
        lambda x, p: (x.mean(-1), x.sum(-1), x.prod(-1), x.logsumexp(-1), x.softmax(-1)),
        lambda x, p: (x.max(-1), x.median(-1), x.sort(-1), x.topk(1), x.cumsum(-1), x.norm(dim=1)),
        lambda x, p: (x[0, 0].sum(0), x[0, 0].max(), x[0, 0].argmax(), x[0, 0].cumsum(0)),
        lambda x, p: (F.layer_norm(x, (1,)), F.rms_norm(x, (1,)), F.group_norm(p, 1)),
        lambda x, p: (F.avg_pool2d(p, 1), F.adaptive_avg_pool2d(p, 1), F.interpolate(p, (2, 3))),
        lambda x, p: (x @ x.mT, x[:1] @ x[:1], F.conv2d(p, p[:2]), F.softmax(p, 1)),
        trained=False,
    ),
    program(
        "far rows",
        _far,
        lambda x, i: (x[i], x.index_select(0, i), x.index_select(0, i.int()), x[i.int()]),
        lambda x, i: (x.gather(0, i[:, None].expand(-1, 2)), x.take(i), x[i - x.shape[0]]),
        lambda x, i: (F.embedding(i, x), F.embedding(i.int(), x)),
        _written,
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "first of equals",
        _equals,
        lambda x: (x.argmax(-1), x.argmin(-1), x.argmax(0), x.argmin(0), x.argmax(), x.argmin()),
        lambda x: (x.max(-1), x.min(-1), x.max(0).indices, x.min(0).indices),
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "long reductions",
        _long,
        lambda x, y: (x.sum(), x.mean(), x.norm(), torch.linalg.vector_norm(x), x.amax()),
        lambda x, y: (x.norm(1), x.var(), x.logsumexp(0), x.argmax(), x.count_nonzero()),
        lambda x, y: (y.sum(-1), y.norm(dim=-1), y.mean(-1), y.T.sum(0), y.std(-1), y.amin()),
        lambda x, y: (torch._foreach_norm([x, x[:5]]), (x > 1).sum(), (x > 1).any(), y.sum((0, 1))),
        lambda x, y: (x.softmax(0), y.log_softmax(-1), x.float().cumsum(0), F.mse_loss(x, x * 0)),
        lambda x, y: (x.dot(x.flip(0)).float(), F.rms_norm(y, y.shape[1:]), x.max(0), y.min(1)),
        trained=False,
        every=True,
    ),
    program(
        "attention with options together",
        _heads,
        *itertools.starmap(
            _attends,
            (
                *(("mask", 0.3, False), ("bias", 0.3, False), ("causal", 0.3, False)),
                *(("mask", None, True), ("bias", 0.7, True), ("causal", 0.7, True)),
                *(("none", 0.3, True), ("bias", None, False)),
            ),
        ),
        dtypes=FLOATS[:3],
    ),
)
