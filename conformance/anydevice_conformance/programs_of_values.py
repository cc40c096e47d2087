"""Functions of unusual values: large, the largest, small, decimal ones, and none at all."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    FLOATS,
    NUMBERS,
    WIDE_FLOATS,
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
