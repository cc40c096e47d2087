"""Sums, quotients and functions with the options that models give them."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    ALL,
    INTEGERS,
    NUMBERS,
    WIDE_FLOATS,
    numbers,
    of_shapes,
)

__all__ = ["ELEMENTS"]


def _reduced(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Of three to six dimensions, with sides next to those of tiles; one of them at times long."""
    some = (2, 33, 3), (3, 2, 129), (5, 3, 2, 4), (2, 1, 3, 2, 5), (2, 3, 1, 2, 1, 3), (2, 5, 4097)
    size = dice.among(*some, (66_001, 1, 1), (1, 66_001, 1), (1, 2, 66_001))
    high = dice.among(3, 3, 0)
    return [numbers(dice, dtype, *size, low=-3, high=high)]


def _wide(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Of three dimensions of at least 3."""
    return [numbers(dice, dtype, *dice.among((3, 33, 4), (5, 3, 129), (3, 4097, 3)))]


def _signs(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Two of one shape without zeros, and a row; half of the numbers negative."""
    size = dice.among((3, 5), (33,), (2, 1025), (4, 1, 7))
    found = []
    for one in (size, size, size[-1:]):
        values = numbers(dice, dtype, *one, low=1, high=9)
        if dtype is not torch.uint8:
            values = values * (dice.integers(0, 2, *one) * 2 - 1).to(dtype)
        found.append(values)
    return found


def _limits(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """The least and the largest integers, and those next to them."""
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    some = [least, least + 1, most, most - 1, 0, 1, most // 2, most // 2 + 1]
    order = dice.integers(0, len(some), dice.among(33, 70))
    return [torch.tensor(some)[order].to(dtype), torch.tensor(some)[order.flip(0)].to(dtype)]


def _text(x: torch.Tensor) -> Any:
    """What is printed; without the device's name, and the line that is broken for it."""
    texts = (repr(x), f"{x.flatten()[0]}")
    return [
        " ".join(
            text.replace(f" device='{x.device}',", "").replace(f", device='{x.device}'", "").split()
        )
        for text in texts
    ]


#: What computes with elements.
ELEMENTS: Final = (
    program(
        "sums of dimensions",
        _reduced,
        lambda x: (x.sum(), x.sum(0), x.sum(-1, keepdim=True), x.sum((0, -1))),
        lambda x: (x.sum(1), x.sum(tuple(range(1, x.dim())))),
        lambda x: (x.float().mean(1), x.double().mean((0, 1), keepdim=True)),
        lambda x: (x != 0).sum(-1),
        lambda x: (x.count_nonzero(0), x.count_nonzero()),
        lambda x: ((x > 2).any(1), (x < 3).all(-1), (x > 0).any(), (x > -9).all()),
        lambda x: (x.cumsum(0), x.cumsum(-1), x.cumsum(1)[:, -1]),
        lambda x: (x[..., :2].prod(-1), x[:, :0].sum(1), x[:, :0].prod(1), x[:, :0].any(1)),
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "extremes of dimensions",
        _reduced,
        lambda x: (x.amax(-1), x.amin(0), x.amax((0, 2), keepdim=True), x.amin()),
        lambda x: (x.max(), x.min(), x.max(1).values, x.min(-1).values),
        lambda x: torch.aminmax(x, dim=0, keepdim=True),
        lambda x: (torch.maximum(x, -x), torch.minimum(x, x.flip(0))),
        lambda x: (x.cummax(1).values, x.cummin(-1).values),
        lambda x: x.clamp(-2, 1).amax(1),
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "moments and norms",
        _wide,
        lambda x: (
            x.var(1),
            x.var((0, -1)),
            x.var((1, 2), correction=0),
            x.std(-1, correction=2, keepdim=True),
        ),
        lambda x: (x.mean(0), x.mean((1, 2)), x.mean()),
        lambda x: torch.var_mean(x, (0, 1)),
        lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (2, 1, math.inf, -math.inf, 0, 3)],
        lambda x: (x.norm(), x.norm(dim=(0, 1)), x.norm(1, -1, keepdim=True)),
        lambda x: (x.logsumexp(1), x.nansum(-1)),
        trained=False,
    ),
    program(
        "gradients of sums",
        of_shapes((3, 33, 5)),
        lambda x: (x.var(1), x.std((0, 2), correction=0), x.mean((0, 1))),
        lambda x: [torch.linalg.vector_norm(x, p, 1) for p in (2, 1, math.inf, 3)],
        lambda x: (x.cumsum(1), x.flip(1).cumsum(-1), torch.logcumsumexp(x, 1), (x / 2).cumprod(2)),
        lambda x: (x[:, :4].prod(1), x.amax((0, 1)), x.median(1).values),
        lambda x: (x.diff(dim=1), torch.trapezoid(x, dim=-1), x.quantile(0.3, 1)),
        dtypes=WIDE_FLOATS,
    ),
    program(
        "quotients and remainders",
        _signs,
        lambda x, y, z: (x // y, x % y, torch.fmod(x, y), torch.div(x, y, rounding_mode="trunc")),
        lambda x, y, z: (x // 3, x % 3, x // z, 7 // y, 7 % y),
        lambda x, y, z: (x / y, x / 4, 3 / y),
        lambda x, y, z: (x.abs() // 2, x * y // y, x * z % z),
        dtypes=(*WIDE_FLOATS, *INTEGERS),
        trained=False,
    ),
    program(
        "functions with options",
        _signs,
        lambda x, y, z: (x.clamp(z - 1, z + 1), x.clamp(min=y), x.clamp(max=2)),
        lambda x, y, z: (x.lerp(y, 0.3), x.lerp(y, z / 9), torch.addcdiv(x, y, z, value=0.5)),
        lambda x, y, z: (x.add(y, alpha=-2), x.sub(z, alpha=3), torch.rsub(x, y), x.addcmul(y, z)),
        lambda x, y, z: (F.leaky_relu(x, 0.3), F.elu(x, 0.7), F.celu(x, 2.0), F.hardtanh(x, -1, 2)),
        lambda x, y, z: (F.softplus(x, 2.0, 3.0), F.threshold(x, 0.5, -3), F.hardshrink(x, 1.5)),
        lambda x, y, z: (F.gelu(x, approximate="tanh"), F.silu(x), F.mish(x), F.logsigmoid(x)),
        lambda x, y, z: F.prelu(x[None], z[:1].detach().abs()),
        lambda x, y, z: (
            x.abs().pow(1.5),
            x.pow(3),
            x.abs().pow(-0.5),
            (x / 4).pow(2.0),
            x.square(),
        ),
        lambda x, y, z: (x.atan2(y), x.hypot(z), x.copysign(y), x.logaddexp(z), x.sinc()),
        lambda x, y, z: (x.exp(), x.abs().log1p(), x.rsqrt().nan_to_num(5.0), x.tanh(), x.erf()),
        lambda x, y, z: (x.softmax(-1) * y, x.sigmoid() * z, x * x.sigmoid().log()),
    ),
    program(
        "limits of integers",
        _limits,
        lambda x, y: (x + y, x - y, x * 3, -x),
        lambda x, y: (x < y, x >= y, x == y, x.sign(), x.bool()),
        lambda x, y: (torch.maximum(x, y), torch.minimum(x, y), x.amax(), x.amin(), x.clamp(-3, 3)),
        lambda x, y: (x & y, x | y, x ^ y, ~x, x >> 1, x << 1),
        lambda x, y: (x.sum(), x.cumsum(0), x.sort().values, x.unique(return_inverse=True)),
        lambda x, y: (x // 7, x % 7, x.float(), x.double()),
        lambda x, y: (x.long(), x.int(), x.short(), x.to(torch.int8), x.to(torch.uint8)),
        lambda x, y: (torch.where(x > y, x, y), x.masked_fill(x > y, 5), x.flip(0).roll(1)),
        dtypes=INTEGERS,
        trained=False,
    ),
    program(
        "numbers on the host",
        of_shapes((3, 5), (5,)),
        lambda x, y: (x * torch.tensor([7.0, 2.5, 3.0])[1], torch.tensor([9, 2])[1] * x),
        lambda x, y: (x + torch.tensor([[1, 4]])[0, 1], x - torch.tensor(3.5, dtype=torch.float64)),
        lambda x, y: (x < torch.tensor([0, 1])[1], torch.maximum(x, x * 0 + torch.tensor(2))),
        lambda x, y: torch.where(x > 1, x, torch.tensor([5.0, 2.0], dtype=x.dtype)[1]),
        lambda x, y: (x * y[3], y[1] + x, x // y[2:3].abs().add(1), x == y[4], x.mul(y[-1:])),
        lambda x, y: (x * 2.5, x + True, 3 - x, x / 4, x + 1e-3, x * (1 << 20)),
        dtypes=NUMBERS,
        trained=False,
    ),
    program("text", of_shapes((2, 3)), _text, dtypes=ALL, trained=False),
)
