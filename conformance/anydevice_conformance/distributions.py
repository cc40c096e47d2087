"""Distributions of torch, drawn from with chosen parameters; what comes is turned to [0, 1)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice_conformance.chances import FLOATS, Trial, below_normal

__all__ = ["DISTRIBUTIONS", "Distribution"]

Distribution = Callable[[Trial], torch.Tensor]
special: Any = torch.special
_WIDE: Final = (torch.float32, torch.float64)
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _made(t: Trial, name: str, dtype: torch.dtype) -> torch.Tensor:
    """By `torch.rand` or the like: made, filled by ``out=``, or like another."""
    make: Any = getattr(torch, name)
    how = t.one_of("made", "out=", "like")
    if how == "made":
        drawn: torch.Tensor = make(t.shape(), dtype=dtype, device=t.device)
    elif how == "out=":
        target = t.target(dtype, plain=t.subject.quick)  # few draw into a view: a whole run does
        drawn = make(target.shape, out=target, dtype=dtype, device=t.device)
    else:
        drawn = getattr(torch, f"{name}_like")(t.target(dtype))
    assert drawn.dtype is dtype, f"{t} gave {drawn.dtype}"
    assert drawn.device == t.device, f"{t} gave a tensor on {drawn.device}"
    return drawn


def _rand(t: Trial) -> torch.Tensor:
    dtype = t.dtype(*FLOATS, torch.complex64)
    drawn = _made(t, "rand", dtype)
    x = t.seen(torch.view_as_real(drawn) if dtype.is_complex else drawn)
    assert x.min() >= 0, f"{t} gave {x.min()}"
    assert x.max() < 1, f"{t} gave 1 or more"
    return x


def _uniform(t: Trial) -> torch.Tensor:
    dtype = t.dtype(*FLOATS)
    low = t.one_of(0.0, -1.0, -3.5, 0.75, -90.0)
    width = t.one_of(1.0, 8.0, 0.5, 128.0, 0.0)
    high = low + width
    x = t.seen(t.target(dtype).uniform_(low, high))
    assert low <= x.min(), f"{t} gave {x.min()}"
    assert x.max() <= high, f"{t} gave {x.max()}"
    if not width:
        return t.uniform(1)
    t.slack += torch.finfo(dtype).eps * max(abs(low), abs(high)) / width
    return (x - low) / width


def _randn(t: Trial) -> torch.Tensor:
    dtype = t.dtype(*FLOATS, torch.complex64)
    drawn = _made(t, "randn", dtype)
    if dtype.is_complex:
        return below_normal(t.seen(torch.view_as_real(drawn)) * math.sqrt(2))
    return below_normal(t.seen(drawn))


def _normal(t: Trial) -> torch.Tensor:
    """By each of the forms of `torch.normal`, and in place."""
    dtype = t.dtype(*FLOATS)
    form = t.one_of("in place", "numbers", "tensors", "a tensor of deviations", "of means")
    mean: Any = t.one_of(0.0, -2.0, 3.5)
    deviation: Any = t.one_of(1.0, 0.5, 7.0, 0.0)
    if form == "in place":
        x = t.seen(t.target(dtype).normal_(mean, deviation))
    elif form == "numbers":
        shape = t.shape()
        x = t.seen(torch.normal(mean, deviation, shape, dtype=dtype, device=t.device))
    else:
        shape = t.shape(wide=True)
        means = 8 * t.uniform(*shape) - 4
        deviations = 0.1 + 3 * t.uniform(*shape)
        if form == "tensors":
            given = (t.tensor(means, dtype), t.tensor(deviations, dtype))
            x = t.seen(torch.normal(*given))
            mean, deviation = means, deviations
        elif form == "of means":
            deviation = deviation or 1.0
            x, mean = t.seen(torch.normal(t.tensor(means, dtype), deviation)), means
        else:
            x = t.seen(torch.normal(mean, t.tensor(deviations, dtype)))
            deviation = deviations
    if isinstance(deviation, float) and not deviation:
        assert x.eq(mean).all(), f"{t}: without deviation it gave other than the mean"
        return t.uniform(1)
    if dtype not in _WIDE:
        t.slack *= 4
        if form not in ("in place", "numbers"):  # 4 is 40 deviations of 0.1
            t.slack *= 4
    return below_normal((x - mean) / deviation)


def _exponential(t: Trial) -> torch.Tensor:
    dtype, rate = t.dtype(*FLOATS), t.one_of(1.0, 0.25, 3.0)
    x = t.seen(t.target(dtype).exponential_(rate))
    assert x.min() >= 0, f"{t} gave {x.min()}"
    if dtype in _WIDE:
        assert (x == 0).sum() < 3, f"{t} gave 0 several times"
    return -(-rate * x).expm1()


def _log_normal(t: Trial) -> torch.Tensor:
    dtype, mean, deviation = t.dtype(*_WIDE), t.one_of(0.0, 1.0, -2.0), t.one_of(0.5, 1.0)
    x = t.seen(t.target(dtype).log_normal_(mean, deviation))
    return below_normal((x.log() - mean) / deviation)


def _cauchy(t: Trial) -> torch.Tensor:
    dtype, middle, width = t.dtype(*_WIDE), t.one_of(0.0, 1.0, -3.0), t.one_of(1.0, 0.5, 2.0)
    x = t.seen(t.target(dtype).cauchy_(middle, width))
    x = x.clamp(-1e30, 1e30)  # it may be infinite, by a chance of some millionths
    return ((x - middle) / width).atan() / math.pi + 0.5


def _geometric(t: Trial) -> torch.Tensor:
    dtype, share = t.dtype(*FLOATS, *_INTEGERS[:3]), t.one_of(0.5, 0.2, 0.9)
    x = t.seen(t.target(dtype).geometric_(share))
    assert x.min() >= 1, f"{t} gave {x.min()}"
    assert x.eq(x.round()).all(), f"{t} gave what is no whole number"
    return t.between(1 - (1 - share) ** (x - 1), 1 - (1 - share) ** x)


#: Least, and behind the greatest; of each dtype those that it holds.
_BOUNDS: Final = (
    *((0, 2), (0, 10), (-5, 7), (-100, -3), (3, 4), (-1, 1), (0, 100), (-128, 127)),
    *((0, 30_000), (-32_768, 32_767), (0, (1 << 31) - 1), (-(1 << 31), (1 << 31) - 1)),
    *((0, (1 << 31) + 5), (-(1 << 40), 1 << 41), ((1 << 33) + 1, (1 << 33) + 8)),
    *((-(1 << 62), 1 << 62), (0, (1 << 63) - 1), (-(1 << 63), 5)),
)


def _randint(t: Trial) -> torch.Tensor:
    dtype = t.dtype(torch.int64, torch.int64, *_INTEGERS, torch.float32, torch.bfloat16)
    if dtype.is_floating_point:
        least = -(1 << 24) if dtype is torch.float32 else -256
        bounds = [b for b in _BOUNDS if least <= b[0] and b[1] <= -least]
    else:
        info = torch.iinfo(dtype)
        bounds = [b for b in _BOUNDS if info.min <= b[0] and b[1] <= info.max]
    low, high = t.one_of(*bounds)
    how = t.one_of("randint", "randint_like", "random_", "randint without low")
    if how == "randint without low":
        low, high = 0, max(high, 1)
        drawn = torch.randint(high, t.shape(), dtype=dtype, device=t.device)
    elif how == "randint":
        drawn = torch.randint(low, high, t.shape(), dtype=dtype, device=t.device)
    elif how == "randint_like":
        drawn = torch.randint_like(t.target(dtype), low, high)
    else:
        drawn = t.target(dtype).random_(low, high)
    assert drawn.dtype is dtype, f"{t} gave {drawn.dtype}"
    t.slack = 0.0
    return _of_integers(t, drawn, low, high)


def _of_integers(t: Trial, drawn: torch.Tensor, low: int, high: int) -> torch.Tensor:
    exact = drawn.detach().cpu()
    x = t.seen(drawn)
    assert low <= int(exact.min()), f"{t} gave {exact.min()}, below {low}"
    assert int(exact.max()) < high, f"{t} gave {exact.max()}, not below {high}"
    assert x.eq(x.round()).all(), f"{t} gave what is no whole number"
    if not exact.is_floating_point() and low + (1 << 62) >= high > low + 4096:
        digits = (exact.long() - low).flatten()
        allowed = 6 * math.sqrt(digits.numel() / 4) + 1
        for bit in range((high - low).bit_length() - 12):
            ones = int(((digits >> bit) & 1).sum())
            off = abs(ones - digits.numel() / 2)
            assert off < allowed, f"{t}: bit {bit} is set in {ones} of {digits.numel()}"
    width = float(high - low)
    below = (x - float(low)) / width
    return t.between(below, below + 1 / width)


def _random(t: Trial) -> torch.Tensor:
    """Without bounds: all that the dtype holds from zero on, of a floating one whole numbers."""
    dtype = t.dtype(*_INTEGERS, torch.bool, torch.float32, torch.float64)
    if dtype is torch.bool:
        high = 2
    elif dtype.is_floating_point:
        high = 1 + round(2 / torch.finfo(dtype).eps)
    else:
        high = 1 << (torch.iinfo(dtype).bits - (dtype is not torch.uint8))
    t.words.append("without bounds")
    if dtype is torch.bool:
        drawn = torch.empty(t.shape(), dtype=dtype, device=t.device).random_()
    else:
        drawn = t.target(dtype).random_()
    return _of_integers(t, drawn, 0, high)


def _bernoulli(t: Trial) -> torch.Tensor:
    dtype = t.dtype(*FLOATS)
    form = t.one_of("in place", "in place by a tensor", "bernoulli of a tensor", "with p=")
    share = t.one_of(0.5, 0.003, 0.997, 0.2, 1 / 3, 0.0, 1.0)
    if form.endswith("tensor"):
        shape = t.shape(wide=True)
        shares = t.uniform(*shape)
        shares[shares < 0.05] = 0.0
        shares[shares > 0.95] = 1.0
        given = t.tensor(shares, dtype)
        if form.startswith("in"):
            drawn = t.target(dtype, shape).bernoulli_(given)
        else:
            drawn = torch.bernoulli(given)
    elif form == "in place":
        other = t.dtype(*FLOATS, torch.uint8, torch.int64, torch.int32)
        drawn, shares = t.target(other).bernoulli_(share), torch.tensor(share)
    else:
        drawn, shares = torch.bernoulli(t.target(dtype), p=share), torch.tensor(share)
    x = t.seen(drawn)
    assert (x.eq(0) | x.eq(1)).all(), f"{t} gave other than 0 and 1"
    assert not (x.eq(1) & shares.eq(0)).any(), f"{t}: with the probability 0 it gave 1"
    assert not (x.eq(0) & shares.eq(1)).any(), f"{t}: with the probability 1 it gave 0"
    shares = shares.double().expand(x.shape)
    return t.between(torch.where(x == 1, 1 - shares, 0), torch.where(x == 1, 1, 1 - shares))


def _poisson(t: Trial) -> torch.Tensor:
    dtype = t.dtype(*FLOATS)
    shape = t.shape(wide=True)
    most = t.one_of(1.0, 12.0, 40.0, *([2000.0] if dtype in _WIDE else []))
    rates = most * t.uniform(*shape)
    rates[rates < most / 20] = 0.0
    x = t.seen(torch.poisson(t.tensor(rates, dtype)))
    assert x.eq(x.round()).all(), f"{t} gave what is no whole number"
    assert not x[rates == 0].any(), f"{t}: of a rate of 0 came more"
    return t.between(special.gammaincc(x, rates), special.gammaincc(x + 1, rates))[rates > 0]


def _binomial(t: Trial) -> torch.Tensor:
    dtype, most = t.dtype(*_WIDE), t.one_of(1, 5, 18)
    shape = t.shape(wide=True)
    counts = (t.uniform(*shape) * (most + 1)).floor()
    shares = t.uniform(*shape)
    x = t.seen(torch.binomial(t.tensor(counts, dtype), t.tensor(shares, dtype)))
    assert x.min() >= 0, f"{t} gave {x.min()}"
    assert (x <= counts).all(), f"{t} gave more than it had"
    below, here = torch.zeros_like(x), torch.zeros_like(x)
    for number in range(most + 1):
        rest = (counts - number).clamp(min=0)
        ways = (counts + 1).lgamma() - math.lgamma(number + 1) - (rest + 1).lgamma()
        chance = torch.where(
            counts >= number, ways.exp() * shares**number * (1 - shares) ** rest, 0.0
        )
        below += torch.where(x > number, chance, 0.0)
        here += torch.where(x == number, chance, 0.0)
    return t.between(below, below + here)


def _gamma(t: Trial) -> torch.Tensor:
    dtype = t.dtype(*_WIDE)
    form = 0.2 + t.one_of(1.0, 9.0, 60.0) * t.uniform(*t.shape(wide=True))
    x = t.seen(torch._standard_gamma(t.tensor(form, dtype)))
    share: torch.Tensor = special.gammainc(form, x)
    return share


def _dirichlet(t: Trial) -> torch.Tensor:
    dtype, rest = t.dtype(*_WIDE), t.one_of(1.0, 2.0, 6.0)
    form = torch.tensor([1.0, rest], dtype=torch.float64).expand(t.count, 2).clone()
    x = t.seen(torch._sample_dirichlet(t.tensor(form, dtype)))
    assert torch.allclose(x.sum(1), torch.ones(()).double(), atol=1e-5), f"{t}: the sum is not 1"
    return 1 - (1 - x[:, 0]) ** rest


#: Name to a distribution.
DISTRIBUTIONS: Final[dict[str, Distribution]] = {
    "rand": _rand,
    "uniform_": _uniform,
    "randn": _randn,
    "normal": _normal,
    "exponential_": _exponential,
    "log_normal_": _log_normal,
    "cauchy_": _cauchy,
    "geometric_": _geometric,
    "randint": _randint,
    "random_": _random,
    "bernoulli": _bernoulli,
    "poisson": _poisson,
    "binomial": _binomial,
    "gamma": _gamma,
    "dirichlet": _dirichlet,
}
