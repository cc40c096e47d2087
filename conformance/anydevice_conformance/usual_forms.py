"""Usual operators in less usual forms: numbers first, several dimensions, other options, lists."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.usual_operator import (
    ALL,
    CUBE,
    INTEGERS,
    NUMBERS,
    WIDE_FLOATS,
    numbers,
    of_shapes,
    of_sizes,
    usual,
)

__all__ = ["FORMS"]

_ROWS: Final = of_sizes((3, 5), (33,), (1, 7), (65, 3), (1,), (1031,))


def _few(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Whole numbers, most of which come again; at times so large that a float has not all."""
    values = dice.integers(0, 5, dice.among(33, 33, 300))
    if dtype is torch.int64:
        values[::2] += 1 << 40
    return [values.to(dtype)]


def _blind(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Queries, keys, values and a mask, by which some queries see nothing."""
    q, k, width = dice.among(3, 17), dice.among(3, 9), dice.among(4, 8)
    mask = torch.rand(q, k, generator=dice.generator) > 0.4
    mask[int(dice.integers(0, q))] = False
    sizes = (2, 2, q, width), (2, 2, k, width), (2, 2, k, width)
    return [*(numbers(dice, dtype, *size, low=-2, high=2) for size in sizes), mask]


def _placed(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A table, places in its columns of which some come again, and values."""
    rows, columns = dice.among(3, 17), dice.among(5, 9)
    size = rows, dice.among(1, 7, 33)
    return [
        numbers(dice, dtype, rows, columns, low=-3, high=3),
        dice.integers(0, columns, *size),
        numbers(dice, dtype, *size, low=-3, high=3),
    ]


def _numbers_first(x: torch.Tensor) -> Any:
    return 2 - x, 3 * x, 1 + x, 7 // (x.abs() + 1), 2.5 - x, x < 3, x == 2


def _items(x: torch.Tensor) -> Any:
    """What goes to the host as numbers of python's."""
    flat = x.reshape(-1)
    found: list[Any] = [flat[0].item(), flat[-1].item(), bool(flat[0]), flat[:9].tolist()]
    same = torch.equal(x, x.clone()), torch.equal(x, x == 0), torch.allclose(x * 1.0, x * 1.0)
    return [*found, *same, float(flat[-1]), int(flat[0]), str(x.shape)]


def _written(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Assignments to parts."""
    found = x.clone()
    found[1:, ::2] = y[1:, ::2]
    found[0] = 3
    found[..., -1] += 1
    found[found > 2] = 1
    found[[0, -1], 0] = y[0, :2]
    found[:, 1][y[:, 1] > 0] *= 2
    return found


def _lists(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Many tensors at once, more than one kernel takes."""
    many = [x * n for n in range(1, 56)] + [y, y.mT]
    more = [one + 1 for one in many]
    found = torch._foreach_add(many, more, alpha=2)
    torch._foreach_mul_(found, 0.5)
    torch._foreach_addcmul_(found, many, more, value=0.1)
    torch._foreach_lerp_(found, more, 0.3)
    torch._foreach_sqrt_(more[:0] + [one.abs() for one in more])
    torch._foreach_zero_(many[-2:])
    torch._foreach_copy_(many[:2], more[:2])
    return found, many[0], many[-1], torch._foreach_norm(found[-3:]), torch._foreach_max(found[:3])


def _quotients(x: torch.Tensor) -> Any:
    """Rounded ones, by numbers of either sign, of which some leave nothing over."""
    y = torch.where(x == 0, x + 1, x)
    modes = [torch.div(x, n, rounding_mode=mode) for n in (3, -2) for mode in ("floor", "trunc")]
    products = y * 6
    return *modes, x // -3, x % 4, x % -4, x.fmod(-3), products // y, products % y, -products // y


#: All of them.
FORMS: Final = (
    usual("numbers first", _ROWS, _numbers_first, *NUMBERS, trained=False),
    usual("rounded quotients", _ROWS, _quotients, *WIDE_FLOATS, *INTEGERS, trained=False),
    usual("items", _ROWS, _items, *ALL, trained=False),
    usual("parts that are written", of_shapes((5, 7), (5, 7)), _written, *NUMBERS),
    usual("lists of tensors", of_shapes((3, 5), (2, 33)), _lists, *WIDE_FLOATS, trained=False),
    usual(
        "attention that sees nothing",
        _blind,
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, attn_mask=m),
        trained=False,
    ),
    usual("gelu by tanh", _ROWS, lambda x: F.gelu(x, approximate="tanh")),
    usual(
        "sums of two dimensions",
        CUBE,
        lambda x: (x.sum((0, 2)), x.sum((1, 2), keepdim=True)),
        *ALL,
    ),
    usual(
        "means of two dimensions", CUBE, lambda x: (x.mean((0, 2)), x.std((1, 2)), x.amax((0, 1)))
    ),
    usual(
        "in another dtype",
        CUBE,
        lambda x: (
            x.softmax(1, dtype=torch.float32),
            x.sum(1, dtype=torch.float32),
            x.cumsum(0, dtype=torch.float32),
        ),
    ),
    usual(
        "sums as int32",
        CUBE,
        lambda x: x.sum(1, dtype=torch.int32),
        *INTEGERS,
        torch.bool,
        trained=False,
    ),
    usual(
        "mean and variance",
        CUBE,
        lambda x: (*torch.var_mean(x, 1), *torch.std_mean(x, correction=0)),
    ),
    usual("nanmean", CUBE, lambda x: (torch.where(x > 5, torch.nan, x).nanmean(1),)),
    usual("aminmax", CUBE, lambda x: tuple(torch.aminmax(x, dim=1)), *NUMBERS, trained=False),
    usual(
        "softmax over the middle",
        CUBE,
        lambda x: (x.softmax(1), x.log_softmax(0), F.softmin(x, 1)),
    ),
    usual(
        "powers",
        of_sizes((33,), (3, 5)),
        lambda x: ((x.abs() + 0.1) ** 0.5, x**3, x**-1, x**0, 1.5**x),
    ),
    usual("whole powers", _ROWS, lambda x: (x**2, x**3, x**0), *INTEGERS, trained=False),
    usual("shifts", _ROWS, lambda x: (x << 2, x >> 1), *INTEGERS, trained=False),
    usual(
        "bounds that are tensors", of_shapes((3, 5), (5,)), lambda x, y: x.clamp(y, y + 1), *NUMBERS
    ),
    usual(
        "unique with counts",
        _few,
        lambda x: x.unique(return_inverse=True, return_counts=True),
        *NUMBERS,
        trained=False,
    ),
    usual(
        "unique in a row",
        _few,
        lambda x: x.unique_consecutive(return_counts=True),
        *NUMBERS,
        trained=False,
    ),
    usual("counts", _few, lambda x: (x % 5).long().bincount(minlength=7), *INTEGERS, trained=False),
    usual("isin", _few, lambda x: torch.isin(x, x[:3]), *NUMBERS, trained=False),
    usual(
        "repeat_interleave",
        _few,
        lambda x: (x.repeat_interleave(3), x.repeat_interleave((x % 5).long())),
        *NUMBERS,
        trained=False,
    ),
    usual(
        "bucketize",
        _ROWS,
        lambda x: torch.bucketize(x, torch.arange(-5, 6, device=x.device).to(x.dtype), right=True),
        *NUMBERS,
        trained=False,
    ),
    usual(
        "cumsum in place",
        _ROWS,
        lambda x: x.cumsum(0),
        *NUMBERS,
        inplace_variant=lambda x: x.cumsum_(0),
    ),
    usual(
        "copies that start elsewhere",
        CUBE,
        lambda x: (x[1:].contiguous(), x[:, :, 1:].clone(), x.mT.reshape(-1)),
        *ALL,
    ),
    usual(
        "parts and joins",
        CUBE,
        lambda x: torch.cat([one * 1 for one in x.split(2, -1)][::-1], -1),
        *NUMBERS,
    ),
    usual(
        "many in one",
        of_shapes((3, 5)),
        lambda x: torch.cat([x * n for n in range(70)], 1),
        *NUMBERS,
    ),
    usual(
        "cross and trace",
        of_shapes((5, 3), (5, 3)),
        lambda x, y: (torch.linalg.cross(x, y), x.trace(), x.diag_embed()),
        *NUMBERS,
    ),
    usual(
        "sums by index",
        _placed,
        lambda x, i, v: x.scatter_reduce(1, i, v, "sum", include_self=False),
        *NUMBERS,
        inplace_variant=lambda x, i, v: x.scatter_reduce_(1, i, v, "sum"),
    ),
    usual(
        "means by index", _placed, lambda x, i, v: x.scatter_reduce(1, i, v, "mean"), trained=False
    ),
    usual(
        "products by index",
        _placed,
        lambda x, i, v: x.scatter_reduce(1, i, v, "prod"),
        *NUMBERS,
        trained=False,
    ),
    usual(
        "extremes by index",
        _placed,
        lambda x, i, v: (
            x.scatter_reduce(1, i, v, "amax"),
            x.scatter_reduce(1, i, v, "amin", include_self=False),
        ),
        *NUMBERS,
        trained=False,
    ),
    usual(
        "sums by a row of places",
        _placed,
        lambda x, i, v: x.index_add(1, i[0], v, alpha=2),
        *NUMBERS,
        inplace_variant=lambda x, i, v: x.index_add_(1, i[0], v),
    ),
    usual(
        "columns by index",
        _placed,
        lambda x, i, v: (x[:, i[0]], x[..., i[0] - 1], x.index_select(1, i[0])),
        *ALL,
    ),
    usual(
        "parts of complex numbers",
        of_shapes((3, 5), (3, 5)),
        lambda x, y: (
            torch.complex(x, y).abs(),
            torch.view_as_real(torch.complex(x, y) * torch.complex(y, x)),
            torch.complex(x, y).conj().imag * 1,
        ),
        *WIDE_FLOATS,
    ),
    usual("quantile", of_sizes((33,), (3, 65)), lambda x: torch.quantile(x, 0.3, -1), *WIDE_FLOATS),
    usual(
        "bags",
        _placed,
        lambda x, i, v: (
            F.embedding_bag(i % x.shape[0], x, mode="sum"),
            F.embedding(i % x.shape[0], x),
        ),
    ),
)
