"""Choices by chance: of categories and permutations, and of what layers drop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from anydevice_conformance.chances import FLOATS, Trial, below_normal
from anydevice_conformance.distributions import Distribution

__all__ = ["CHOICES"]

functional: Any = nn.functional
_HALF: Final = 1e-2


def _multinomial(t: Trial) -> torch.Tensor:
    """With replacement: each pick of its row's weights."""
    dtype, kinds = t.dtype(*FLOATS), t.one_of(2, 3, 33, 1000)
    rows = t.one_of(1, 1, 7)
    weights = 0.05 + t.uniform(rows, kinds)
    weights[:, t.dice.randrange(kinds)] = 0.0
    weights[:, -1] += 0.05 * kinds  # one is likely
    given = t.tensor(weights, dtype)
    given = given[0] if rows == 1 else given
    picks = t.seen(torch.multinomial(given, t.count // rows, replacement=True)).long()
    return _picked(t, weights, picks.view(rows, -1))


def _picked(t: Trial, weights: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    assert picks.min() >= 0, f"{t} picked {picks.min()}"
    assert picks.max() < weights.shape[-1], f"{t} picked {picks.max()}, of {weights.shape[-1]}"
    chances = weights / weights.sum(-1, keepdim=True)
    up_to = chances.cumsum(-1)
    assert (weights.gather(-1, picks) > 0).all(), f"{t} picked what has no weight"
    return t.between((up_to - chances).gather(-1, picks), up_to.gather(-1, picks))


def _without_replacement(t: Trial) -> torch.Tensor:
    """Each pick is one of those that are left."""
    dtype, kinds, taken = t.dtype(*FLOATS), t.one_of(4, 9, 70), 3
    rows = max(40, t.count // 8)
    weights = 0.05 + t.uniform(rows, kinds)
    weights[:, 0] = 0.0
    picks = t.seen(torch.multinomial(t.tensor(weights, dtype), taken)).long()
    assert picks.shape == (rows, taken), f"{t} gave the shape {tuple(picks.shape)}"
    found = []
    for number in range(taken):
        pick = picks[:, number : number + 1]
        found.append(_picked(t, weights, pick))
        weights = weights.scatter(1, pick, 0.0)
    return torch.cat(found)


def _permutations(t: Trial) -> torch.Tensor:
    """Many of few: each order is as likely; and long ones, whose places are uniform."""
    dtype = t.dtype(torch.int64, torch.int64, torch.int32, torch.float32)
    found = []
    for size in (2, 3, 4):
        orders = torch.stack(
            [torch.randperm(size, device=t.device, dtype=dtype) for _ in range(80)]
        )
        x = t.seen(orders)
        assert x.sort(1).values.eq(torch.arange(size)).all(), f"{t} of {size} gave no permutation"
        powers = torch.tensor([float(size**n) for n in range(size)], dtype=torch.float64)
        every = torch.cartesian_prod(*[torch.arange(size)] * size).double()
        every = every[every.sort(1).values.eq(torch.arange(size)).all(1)]
        rank = torch.searchsorted((every @ powers).sort().values, x @ powers).double()
        found.append(t.between(rank / len(every), (rank + 1) / len(every)))
    size = t.one_of(t.count, 1, 50, 2500, *(() if t.count < 9000 else (70_001, 131_075)))
    x = t.seen(torch.randperm(size, device=t.device, dtype=torch.int64))
    assert x.sort().values.eq(torch.arange(size)).all(), f"randperm({size}) is no permutation"
    return torch.cat([*found, t.between(x / size, (x + 1) / size)])


#: Name to a way to drop elements or channels, and how many dimensions make one that is dropped.
_DROPS: Final[dict[str, tuple[Callable[[float], Any], int]]] = {
    "dropout": (lambda p: lambda x: functional.dropout(x, p, training=True), 0),
    "dropout in place": (lambda p: lambda x: functional.dropout(x.clone(), p, True, True), 0),
    "native_dropout": (lambda p: lambda x: torch.native_dropout(x, p, True)[0], 0),
    "nn.Dropout": (nn.Dropout, 0),
    "nn.Dropout1d": (nn.Dropout1d, 1),
    "nn.Dropout2d": (nn.Dropout2d, 2),
    "nn.Dropout3d": (nn.Dropout3d, 3),
    "feature_dropout": (lambda p: lambda x: torch.feature_dropout(x, p, True), 2),
}
_ALPHA: Final[dict[str, tuple[Callable[[float], Any], int]]] = {
    "nn.AlphaDropout": (nn.AlphaDropout, 0),
    "alpha_dropout": (lambda p: lambda x: functional.alpha_dropout(x, p, training=True), 0),
    "nn.FeatureAlphaDropout": (nn.FeatureAlphaDropout, 2),
}
#: What self-normalising layers put in place of what is dropped.
_ALPHA_VALUE: Final = -1.7580993408473766


def _dropped(t: Trial, ways: dict[str, tuple[Callable[[float], Any], int]]) -> torch.Tensor:
    dtype = t.dtype(*FLOATS)
    name, share = t.one_of(*ways), t.one_of(0.1, 0.5, 0.9, 0.003, 0.0, 1.0)
    make, dims = ways[name]
    t.words.append("and its gradient")
    shape = t.shape() if dims == 0 else (4, t.count // 12, 3, *(2, 1)[: dims - 1])[: 2 + dims]
    values = t.tensor(1 + t.uniform(*shape), dtype).requires_grad_()
    result = make(share)(values)
    assert result.dtype is dtype, f"{t} gave {result.dtype}"
    ones = torch.ones_like(result)
    (gradient,) = torch.autograd.grad(result, values, ones)
    x, y, slope = t.seen(values), t.seen(result), t.seen(gradient)
    scale, shift, instead = 1 / (1 - share) if share < 1 else 0.0, 0.0, 0.0
    if ways is _ALPHA and share < 1:
        scale = ((1 - share) * (1 + share * _ALPHA_VALUE**2)) ** -0.5
        shift = -scale * _ALPHA_VALUE * share
        instead = scale * _ALPHA_VALUE + shift
    allowed: Any = {"rtol": t.slack + 1e-5, "atol": 4 * t.slack + 1e-5}
    kept = slope > scale / 2 if share < 1 else torch.zeros_like(x, dtype=torch.bool)
    wanted = torch.where(kept, x * scale + shift, instead)
    assert share in (0, 1) or torch.allclose(y, wanted, **allowed), (
        f"{t}: what is kept or dropped is not what it is called, or not what its gradient says"
    )
    assert torch.allclose(slope, kept.double() * scale, **allowed), f"{t}: a wrong gradient"
    assert share or (kept.all() and torch.allclose(y, x, **allowed)), f"{t} dropped some"
    if dims:
        apart = kept.flatten(2)
        assert apart.eq(apart[..., :1]).all(), f"{t}: a channel is dropped in part"
        kept = apart[..., 0]
    low = torch.where(kept, share, 0.0).double()
    return t.between(low, torch.where(kept, 1.0, share).double())


def _attention(t: Trial) -> torch.Tensor:
    """Attention of equal weights over the unit matrix shows which weights are dropped."""
    dtype, share = t.dtype(*FLOATS), t.one_of(0.1, 0.5, 0.9)
    length = t.one_of(16, 32, 64)
    heads = max(1, t.count // length**2 // 2)
    shape, causal = (2, heads, length, length), t.one_of("whole", "whole", "causal") == "causal"
    query, key = torch.zeros(2, *shape, dtype=dtype, device=t.device)
    value = torch.eye(length, dtype=dtype).to(t.device).expand(shape).contiguous()
    value.requires_grad_()
    result = functional.scaled_dot_product_attention(
        query, key, value, dropout_p=share, is_causal=causal
    )
    (gradient,) = torch.autograd.grad(result, value, torch.ones_like(result))
    y = t.seen(result)
    rows = torch.arange(1, length + 1).double()[:, None] if causal else float(length)
    y = y * rows * (1 - share)
    kept = y > 0.5
    assert torch.allclose(y, kept.double(), atol=4 * t.slack + 1e-4), (
        f"{t}: a weight is neither dropped nor what the others become"
    )
    columns = t.seen(result).sum(-2)
    assert torch.allclose(t.seen(gradient)[..., 0], columns, rtol=0.05, atol=0.05), (
        f"{t}: the gradient is that of another mask"
    )
    if causal:
        seen = torch.ones(length, length).tril().bool().expand(shape)
        assert not (kept & ~seen).any(), f"{t}: it looks ahead"
        kept = kept[seen]
    low = torch.where(kept, share, 0.0).double()
    return t.between(low, torch.where(kept, 1.0, share).double())


def _rrelu(t: Trial) -> torch.Tensor:
    """Slopes of negative numbers; the others stay as they are."""
    dtype, low = t.dtype(torch.float32, torch.float64), t.one_of(0.125, 0.0, 0.5)
    high = t.one_of(1 / 3, 1.0) + low
    values = 3 * t.uniform(*t.shape()) - 2
    given = t.tensor(values, dtype).requires_grad_()
    result = functional.rrelu(given, low, high, training=True)
    (gradient,) = torch.autograd.grad(result, given, torch.ones_like(result))
    y, slope = t.seen(result), t.seen(gradient)
    assert y[values >= 0].eq(values[values >= 0]).all(), f"{t} changed what is positive"
    assert torch.allclose(y, values * slope, atol=1e-5), f"{t}: a wrong gradient"
    slopes = slope[values < 0]
    assert slopes.min() >= low - 1e-6, f"{t}: a slope of {slopes.min()}"
    assert slopes.max() <= high + 1e-6, f"{t}: a slope of {slopes.max()}"
    return (slopes - low) / (high - low)


def _gumbel(t: Trial) -> torch.Tensor:
    """One category of each row, with the softmax of its numbers; sharp, or softly."""
    dtype, kinds, hard = t.dtype(*FLOATS), t.one_of(2, 5, 40), t.one_of("hard", "soft")
    numbers = 3 * t.uniform(max(200, t.count // 8), kinds) - 1.5
    given = t.tensor(numbers, dtype)
    x = t.seen(functional.gumbel_softmax(given, tau=t.one_of(0.5, 2.0), hard=hard == "hard"))
    sums = x.sum(1)
    assert torch.allclose(sums, torch.ones_like(sums), atol=_HALF + 8 * t.slack), (
        f"{t}: the sum is not 1"
    )
    assert hard == "soft" or (x.eq(0) | (x - 1).abs().lt(_HALF)).all(), f"{t} is not sharp"
    picks = x.argmax(1, keepdim=True)
    t.slack *= 4
    return _picked(t, numbers.exp(), picks)


def _initialised(t: Trial) -> torch.Tensor:
    """`torch.nn.init`, in place, as models begin."""
    shape = (max(8, t.count // 64), 64)
    target = t.target(t.dtype(torch.float32, torch.float64, torch.bfloat16), shape)
    kind = t.one_of("trunc_normal_", "xavier_normal_", "kaiming_uniform_", "uniform_")
    if kind == "trunc_normal_":
        x = t.seen(nn.init.trunc_normal_(target, 1.0, 2.0, a=-2.0, b=4.0))
        t.slack *= 4
        ends = below_normal(torch.tensor([-1.5, 1.5], dtype=torch.float64))
        assert x.min() >= -2, f"{t} gave {x.min()}"
        assert x.max() <= 4, f"{t} gave {x.max()}"
        return (below_normal((x - 1) / 2) - ends[0]) / (ends[1] - ends[0])
    if kind == "xavier_normal_":
        deviation = math.sqrt(2 / sum(shape))
        return below_normal(t.seen(nn.init.xavier_normal_(target)) / deviation)
    bound = math.sqrt(6 / shape[1]) if kind == "kaiming_uniform_" else 3.0
    fill = nn.init.kaiming_uniform_ if kind == "kaiming_uniform_" else _about_zero
    return (t.seen(fill(target)) / bound + 1) / 2


def _about_zero(tensor: torch.Tensor) -> torch.Tensor:
    return nn.init.uniform_(tensor, -3.0, 3.0)


#: Name to a way to choose.
CHOICES: Final[dict[str, Distribution]] = {
    "multinomial": _multinomial,
    "multinomial without replacement": _without_replacement,
    "randperm": _permutations,
    "dropout": lambda t: _dropped(t, _DROPS),
    "alpha dropout": lambda t: _dropped(t, _ALPHA),
    "attention's dropout": _attention,
    "rrelu": _rrelu,
    "gumbel_softmax": _gumbel,
    "nn.init": _initialised,
}
