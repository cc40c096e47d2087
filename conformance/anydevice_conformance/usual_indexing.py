"""Usual operators that pick, place, order and move elements about, of every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.usual_operator import (
    ALL,
    NUMBERS,
    different,
    numbers,
    of_shapes,
    of_sizes,
    part,
    rows_by_index,
    usual,
)

__all__ = ["INDEXING"]


_ROWS: Final = of_sizes((3, 5), (17, 33), (1, 7), (65, 2))
_CUBE: Final = of_sizes((2, 3, 5), (3, 1, 7), (5, 4, 3))


def _picked(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A table, places in its rows, and values for them."""
    rows, columns = dice.among(3, 5, 17), dice.among(4, 9)
    order = torch.stack([torch.randperm(columns, generator=dice.generator) for _ in range(rows)])
    few = dice.among(0, 1, 3, 3)
    return [
        numbers(dice, dtype, rows, columns),
        order[:, :few].contiguous(),
        numbers(dice, dtype, rows, few),
    ]


def _masked(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Numbers, a mask that may be broadcast to them, and as many others."""
    size = dice.among((3, 5), (33,), (2, 3, 7), (2, 3, 1, 5))
    chosen = dice.among(size, part(dice, size))
    return [
        numbers(dice, dtype, *size),
        torch.rand(chosen, generator=dice.generator) > 0.5,
        numbers(dice, dtype, *size),
    ]


def _ordered(dice: Dice, dtype: torch.dtype) -> list[Any]:
    return [different(dice, dtype, *dice.among((3, 5), (7,), (2, 33)))]


def _in_place(name: str, *fixed: Any) -> Callable[..., Any]:
    """The method in place, with some arguments already there, behind the tensor."""
    return lambda tensor, *rest: getattr(tensor, name)(*fixed, *rest)


#: Indexing and moving about: of every dtype.
INDEXING: Final = (
    usual(
        "cat",
        of_shapes((2, 5), (3, 5), (0, 5)),
        lambda *t, **o: torch.cat(t, **o),
        *ALL,
        supports_out=True,
    ),
    usual("cat of columns", of_shapes((3, 5), (3, 1)), lambda *t: torch.cat(t, 1), *ALL),
    usual(
        "stack",
        of_shapes((3, 5), (3, 5)),
        lambda *t, **o: torch.stack(t, -1, **o),
        *ALL,
        supports_out=True,
    ),
    usual("flip", _CUBE, lambda x: x.flip(0, -1), *ALL),
    usual("roll", _CUBE, lambda x: x.roll((1, -1), (0, 2)), *ALL),
    usual("repeat", _ROWS, lambda x: x.repeat(2, 1, 3), *ALL),
    usual("tile and rot90", _ROWS, lambda x: x.tile(2).rot90(), *ALL),
    usual("permute", _CUBE, lambda x: x.permute(2, 0, 1).contiguous(), *ALL),
    usual(
        "tril",
        _ROWS,
        lambda x, **o: torch.tril(x, -1, **o),
        *ALL,
        supports_out=True,
        inplace_variant=_in_place("tril_", -1),
    ),
    usual("triu", _CUBE, lambda x: torch.triu(x, 1), *ALL),
    usual("diag", _ROWS, lambda x: x.diagonal(-1).clone(), *ALL),
    usual("unfold", _ROWS, lambda x: x.unfold(-1, 2, 1).clone(), *ALL),
    usual("pad", _ROWS, lambda x: F.pad(x, (1, 2, 0, 1), value=3), *NUMBERS),
    usual("clone of a slice", _CUBE, lambda x: x[::2, :, 1::2].clone(), *ALL),
    usual("expand", _ROWS, lambda x: x[:, None].expand(-1, 3, -1) + x[:, None], *NUMBERS),
    usual(
        "gather", _picked, lambda x, i, v, **o: torch.gather(x, 1, i, **o), *ALL, supports_out=True
    ),
    usual(
        "take_along_dim",
        _picked,
        lambda x, i, v, **o: torch.take_along_dim(x, i, 1, **o),
        *ALL,
        supports_out=True,
    ),
    usual(
        "scatter",
        _picked,
        lambda x, i, v: x.scatter(1, i, v),
        *ALL,
        inplace_variant=_in_place("scatter_", 1),
    ),
    usual(
        "scatter_add",
        _picked,
        lambda x, i, v: x.scatter_add(1, i, v),
        *ALL,
        inplace_variant=_in_place("scatter_add_", 1),
    ),
    usual(
        "scatter_reduce",
        _picked,
        lambda x, i, v: x.scatter_reduce(1, i, v, "amax", include_self=False),
        *NUMBERS,
        trained=False,
    ),
    usual(
        "index_select",
        rows_by_index,
        lambda x, i, v, **o: torch.index_select(x, 0, i, **o),
        *ALL,
        supports_out=True,
    ),
    usual("rows by index", rows_by_index, lambda x, i, v: x[i], *ALL),
    usual(
        "index_add",
        rows_by_index,
        lambda x, i, v: x.index_add(0, i, v, alpha=2),
        *NUMBERS,
        inplace_variant=_in_place("index_add_", 0),
    ),
    usual(
        "index_put",
        rows_by_index,
        lambda x, i, v: x.index_put((i,), v, accumulate=True),
        *ALL,
        inplace_variant=lambda x, i, v: x.index_put_((i,), v, accumulate=True),
    ),
    usual("index_fill", rows_by_index, lambda x, i, v: x.index_fill(0, i, 3), *NUMBERS),
    usual(
        "masked_fill",
        _masked,
        lambda x, m, y: x.masked_fill(m, 1),
        *ALL,
        inplace_variant=lambda x, m, y: x.masked_fill_(m, 1),
    ),
    usual(
        "masked_select",
        _masked,
        lambda x, m, y, **o: torch.masked_select(x, m, **o),
        *ALL,
        supports_out=True,
    ),
    usual("masked_scatter", _masked, lambda x, m, y: x.masked_scatter(m, y), *ALL),
    usual(
        "where", _masked, lambda x, m, y, **o: torch.where(m, x, y, **o), *ALL, supports_out=True
    ),
    usual("where of a number", _masked, lambda x, m, y: torch.where(m, x, 2), *NUMBERS),
    usual("nonzero", _masked, lambda x, m, y: x.nonzero(), *ALL, trained=False),
    usual("topk", _ordered, lambda x, **o: torch.topk(x, 3, **o), *NUMBERS, supports_out=True),
    usual("least of topk", _ordered, lambda x: x.topk(2, 0, largest=False), *NUMBERS),
    usual(
        "kthvalue",
        _ordered,
        lambda x, **o: torch.kthvalue(x, 2, 0, **o),
        *NUMBERS,
        supports_out=True,
    ),
    usual("unique", _ROWS, lambda x: x.unique(return_inverse=True), *NUMBERS, trained=False),
    usual("searchsorted", _ordered, lambda x: torch.searchsorted(x.sort().values, x), *NUMBERS),
    usual(
        "clamp",
        _ROWS,
        lambda x, **o: torch.clamp(x, -2, 3, **o),
        *NUMBERS,
        inplace_variant=_in_place("clamp_", 1),
    ),
    usual(
        "lerp",
        of_shapes((3, 5), (3, 5)),
        lambda x, y, **o: torch.lerp(x, y, 0.25, **o),
        supports_out=True,
        inplace_variant=lambda x, y: x.lerp_(y, 0.75),
    ),
    usual(
        "addcmul",
        of_shapes((3, 5), (3, 5), (5,)),
        lambda x, y, z, **o: torch.addcmul(x, y, z, value=2, **o),
        supports_out=True,
        inplace_variant=lambda x, y, z: x.addcmul_(y, z, value=2),
    ),
    usual(
        "addcdiv",
        lambda dice, dtype: [numbers(dice, dtype, 3, 5, low=0.1, high=0.9) for _ in range(2)],
        lambda x, y, **o: torch.addcdiv(x, x, y, value=2, **o),
        supports_out=True,
        inplace_variant=lambda x, y: x.addcdiv_(y, y + 1, value=2),
    ),
    usual("fill_", _ROWS, lambda x: x.clone().fill_(3), *NUMBERS, trained=False),
    usual("added with alpha", of_shapes((3, 5), (5,)), lambda x, y: x.add(y, alpha=3), *NUMBERS),
    usual("float of it", _ROWS, lambda x: x.float() + 1, *ALL),
    usual("int64 of it", _ROWS, lambda x: x.long(), *ALL, trained=False),
    usual("half of it", _ROWS, lambda x: x.half(), *ALL),
    usual("bfloat16 of it", _ROWS, lambda x: x.bfloat16(), *ALL),
    usual("bool of it", _ROWS, lambda x: x.bool(), *ALL, trained=False),
)
