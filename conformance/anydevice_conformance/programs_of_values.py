"""Functions of unusual values: large, the largest, small, decimal ones, and none at all."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    FLOATS,
    NUMBERS,
    WIDE_FLOATS,
    different,
    numbers,
)

__all__ = ["VALUES"]


def _far(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """From zero to where exponentials overflow, both ways, in steps that grow; and shifted rows."""
    steps = 2.0 ** torch.linspace(-14, 7, dice.among(31, 65), dtype=torch.float64)
    values = torch.cat([-steps.flip(0), torch.zeros(1), steps, torch.tensor([300.0, -300.0])])
    return [values.to(dtype)]


def _greatest(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """The least and the largest numbers of a dtype, and zeros of both signs."""
    of = torch.finfo(dtype)
    some = [of.min, of.max, 0.0, -0.0, 1.0, of.tiny, -of.eps, of.max / 2]
    order = dice.integers(0, len(some), 3, dice.among(8, 33))
    return [torch.tensor(some, dtype=torch.float64)[order].to(dtype)]


def _whole_masks(x: torch.Tensor) -> Any:
    """What a row becomes of which all is masked by the least number, or all but one."""
    least = torch.finfo(x.dtype).min
    row = torch.full_like(x, least)
    other = x.clone().fill_(least)
    other[:, 0] = 0
    more = x.new_full((2, 5), least), torch.zeros_like(x).masked_fill_(x > 0, least)
    return row, other, *more, row.softmax(-1), other.softmax(-1), torch.where(x > 0, least, x)


def _none(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Rows, and nothing, of two forms."""
    return [numbers(dice, dtype, 3, 5), numbers(dice, dtype, 0), numbers(dice, dtype, 0, 5)]


def _beyond(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Numbers none of which comes twice, infinities and NaN of either sign, in rows of odd size."""
    size = dice.among((3, 9), (2, 33), (5, 130))
    found = []
    for sign in (1.0, -1.0):
        values = different(dice, torch.float32, *size).to(dtype) / 2
        for row in values:
            places = torch.randperm(size[-1], generator=dice.generator)[:3]
            row[places] = torch.tensor([sign * math.nan, math.inf, -math.inf]).to(dtype)
        found.append(values)
    return [*found, torch.cat(found, 1)]


def _each_of(*functions: Any) -> Any:
    """Of what has NaN of one sign, and of the other."""
    return lambda x, y, z: [function(one) for function in functions for one in (x, y)]


def _level(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Rows, and channels, of one value each: their variance is zero; of some all values are."""
    rows, width = dice.among(3, 5), dice.among(2, 8, 33, 768)
    powers = torch.tensor([0.0, 1, -2, 0.5, 4, 0.0, 0.25, -64])
    chosen = powers[torch.randperm(len(powers), generator=dice.generator)]
    x = chosen[:rows, None].repeat(1, width).to(dtype)
    pictures = chosen[:6].view(1, 6, 1, 1).repeat(2, 1, 3, 4).to(dtype)
    return [x, pictures, numbers(dice, dtype, width, low=0.5, high=2)]


def _layers_of(x: torch.Tensor, p: torch.Tensor, w: torch.Tensor, eps: float) -> Any:
    """Norms with an epsilon, of rows and of pictures."""
    size = x.shape[-1:]
    return (
        F.layer_norm(x, size, w, w, eps),
        F.layer_norm(x, size, eps=eps),
        F.rms_norm(x, size, w, eps),
        F.group_norm(p, 6, eps=eps),
        F.instance_norm(p, eps=eps),
        F.batch_norm(p, None, None, None, None, True, 0.1, eps),
    )


def _decimal(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Whole numbers, which are not whole multiples of the decimal ones that divide them."""
    whole = dice.integers(-40, 41, 66).to(dtype)
    tenths = dice.integers(1, 9, 66) * 2 - 1
    return [whole, tenths.to(dtype) / dice.among(10, 7)]


def _losses(x: torch.Tensor) -> Any:
    targets = (torch.arange(len(x), device=x.device) % 2).to(x.dtype)
    return (
        F.binary_cross_entropy_with_logits(x, targets, reduction="none"),
        F.cross_entropy(torch.stack([x, -x], -1), targets.long(), reduction="none"),
        F.kl_div(x.log_softmax(0), targets, reduction="none"),
        F.soft_margin_loss(x, targets * 2 - 1, reduction="none"),
    )


#: Functions of unusual values.
VALUES: Final = (
    program(
        "activations of large values",
        _far,
        lambda x: (F.gelu(x), F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), x.tanh()),
        lambda x: (x.sigmoid(), F.logsigmoid(x), F.softplus(x), F.softplus(x, 3, 5), F.elu(x)),
        lambda x: (F.selu(x), F.celu(x, 2), F.hardswish(x), F.hardsigmoid(x), F.softsign(x)),
        lambda x: (x.softmax(0), x.log_softmax(0), x.logsumexp(0), F.tanhshrink(x), x.erf()),
        lambda x: (
            x.expm1().clamp(max=1e4),
            x.abs().log1p(),
            x.erfc(),
            F.relu6(x),
            x.sinh().sign(),
        ),
        lambda x: (x.exp().clamp(max=1e4), x.atan(), x.asinh(), x.logaddexp(-x), x.logaddexp2(x)),
        lambda x: (x.abs().sqrt(), x.pow(2).clamp(max=1e4), x.abs().pow(0.25)),
        lambda x: (x.logit(1e-3), x.nan_to_num(), x.frac(), x.trunc()),
        _losses,
        dtypes=FLOATS,
    ),
    program(
        "largest numbers",
        _greatest,
        _whole_masks,
        lambda x: (x.amax(-1), x.amin(0), x.clamp(-3, 3), x.sign(), x == x.abs(), x < 1),
        lambda x: (x.float(), x.double(), x.bool(), x.abs(), -x, x / 2, x * 0.5),
        lambda x: (torch.maximum(x, -x), x.isfinite(), x.isinf(), x.max(), x.min()),
        lambda x: torch.full((2, 3), torch.finfo(x.dtype).max, dtype=x.dtype, device=x.device),
        lambda x: (
            x.sigmoid(),
            x.tanh(),
            F.relu(x),
            x.masked_fill(x > 0, torch.finfo(x.dtype).min),
        ),
        lambda x: x.masked_fill(x > 1, -torch.inf).softmax(0).nan_to_num(5),
        trained=False,
    ),
    program(
        "orders of what is beyond",
        _beyond,
        _each_of(torch.sort, lambda x: x.sort(-1, descending=True), torch.msort),
        _each_of(torch.argsort, lambda x: x.argsort(0), lambda x: x.sort(stable=True)),
        _each_of(lambda x: x.topk(4), lambda x: x.topk(3, largest=False), lambda x: x.kthvalue(2)),
        _each_of(torch.argmax, torch.argmin, lambda x: (x.argmax(-1), x.argmin(-1))),
        _each_of(lambda x: (x.max(-1), x.min(-1), x.amax(0), x.amin(-1), x.max(), x.min())),
        _each_of(lambda x: (torch.aminmax(x, dim=-1), x.median(-1).values, x.nanmedian())),
        _each_of(lambda x: (x.cummax(-1).values, x.cummin(-1).values)),
        _each_of(lambda x: (torch.maximum(x, x.flip(0)), torch.minimum(x, x.flip(0)))),
        _each_of(lambda x: (torch.fmax(x, x.flip(0)), torch.fmin(x, x.flip(0)), x.clamp(-2, 3))),
        lambda x, y, z: (z.sort(-1).values, z.sort(-1, descending=True).values, z.amax(-1)),
        trained=False,
        digits="values",
        every=True,
    ),
    program(
        "elements beyond",
        _beyond,
        _each_of(lambda x: (x.isnan(), x.isinf(), x.isfinite(), x.isposinf(), x.isneginf())),
        _each_of(lambda x: (x == x, x != x, x < x.flip(0), x >= 0, x.logical_not(), x.bool())),
        _each_of(lambda x: (x.nan_to_num(), x.nan_to_num(2.0, 3.0, -4.0), x.sign(), x.signbit())),
        _each_of(lambda x: (x.floor(), x.round(), x.trunc(), x.abs(), -x, x * 2, x + 1, x / 2)),
        _each_of(lambda x: (F.relu(x), F.relu6(x), F.hardtanh(x), F.leaky_relu(x, 0.5))),
        _each_of(lambda x: (x.masked_fill(x > 1, 0), torch.where(x < 1, x, -x), x.flip(0))),
        _each_of(lambda x: (x.nansum(-1), x.nansum(), x.count_nonzero(), x.any(-1), x.all())),
        _each_of(lambda x: (x.sum(-1), x.mean(0), x.isnan().sum(), x.nanmean(-1))),
        _each_of(
            lambda x: (x.float(), x.double(), torch.cat([x, x]), x.unsqueeze(0).repeat(2, 1, 1))
        ),
        trained=False,
        every=True,
    ),
    program(
        "rows of one value",
        _level,
        *(lambda x, p, w, e=eps: _layers_of(x, p, w, e) for eps in (1e-12, 1e-6, 1e-5, 1e-3)),
        lambda x, p, w: (x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1), F.normalize(x)),
        lambda x, p, w: (x.var(-1), x.std(0, correction=0)[:1] * 0, x.norm(dim=-1), x.mean(-1)),
        lambda x, p, w: (F.cosine_similarity(x, x), F.normalize(p, dim=1), F.rms_norm(x, x.shape)),
        lambda x, p, w: (x.amax(-1), x.max(-1).values, x.sort(stable=True), x.unique()),
        trained=False,
        every=True,
    ),
    program(
        "gradients of rows of one value",
        _level,
        lambda x, p, w: (F.layer_norm(x, w.shape, w, w, 1e-6), F.rms_norm(x, w.shape, w, 1e-6)),
        lambda x, p, w: (F.group_norm(p, 3, eps=1e-5), F.softmax(x, -1), x.norm(dim=-1)),
        lambda x, p, w: F.batch_norm(p, None, None, None, None, True, 0.1, 1e-5),
        dtypes=WIDE_FLOATS,
    ),
    program(
        "functions of nothing",
        _none,
        lambda x, e, r: (torch.isin(x, e), torch.isin(e, x), torch.cat([e, x[0], e]), r.sum(0)),
        lambda x, e, r: (torch.cat([r, x, r]), torch.stack([r, r]), r.view(5, 0) + 1, r.mT * 2),
        lambda x, e, r: (r.sum(), r.prod(0), r.any(1), r.all(), r.cumsum(0), e.sum(), r.sum(1)),
        lambda x, e, r: (x[:0, 1:], x[e.long()], x[:, e.long()], x.index_select(0, e.long())),
        lambda x, e, r: (x.index_add(0, e.long(), r), x.index_fill(1, e.long(), 2), x[x > 99]),
        lambda x, e, r: (
            x.scatter(0, r.long(), r),
            x.gather(0, r.long()),
            x.masked_fill(x > 99, 1),
        ),
        lambda x, e, r: (e.nonzero(), (x > 99).nonzero(), e.unique(), e.sort(), e.sort().values),
        lambda x, e, r: (torch.searchsorted(e, x), torch.bucketize(x, e), e.bool(), e.to(x.dtype)),
        lambda x, e, r: (r.repeat(2, 2), r.expand(3, 0, 5) * 1, r.flip(0), r.roll(1), e.tile(3)),
        lambda x, e, r: (
            torch.where(r > 0, r, 1),
            r.clamp(0, 1),
            e.abs(),
            r.eq(r),
            r.max(1).values,
        ),
        lambda x, e, r: (x[0, 0] * e, e + 2, r * x[:1], r.tril(), e.repeat_interleave(2)),
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "layers of nothing",
        _none,
        lambda x, e, r: (r @ x.mT, x[:, :0] @ r.view(0, 5)[:, :2], F.linear(r, x), r.mT @ r),
        lambda x, e, r: torch.addmm(x, x[:, :0], r, beta=2),
        lambda x, e, r: torch.bmm(r.view(0, 1, 5), r.view(0, 5, 1)),
        lambda x, e, r: (F.relu(r), F.gelu(r), r.softmax(-1), F.layer_norm(r, (5,))),
        lambda x, e, r: (r.mean(1), r.norm(), F.mse_loss(r, r, reduction="sum"), r.logsumexp(1)),
        lambda x, e, r: F.embedding(e.long(), x),
        lambda x, e, r: F.scaled_dot_product_attention(*(r.view(0, 1, 1, 5),) * 3),
        trained=False,
    ),
    program(
        "remainders of decimals",
        _decimal,
        lambda x, y: x.fmod(y),
        lambda x, y: (x.fmod(0.3), x.remainder(y), x.fmod(-y)),
        lambda x, y: (x + y).frac(),
        dtypes=WIDE_FLOATS,
        trained=False,
    ),
)
