"""Indexing, ordering and moving about, with the options that models give them."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    ALL,
    NUMBERS,
    different,
    numbers,
    of_shapes,
)

__all__ = ["MOVES"]


#: Above and below all of a matrix, and between.
_DIAGONALS: Final = (-9, -3, -2, -1, 0, 1, 2, 4, 9)


def _cube(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A cube, places in its middle dimension of which some come again, and others for them."""
    size = dice.among((3, 5, 7), (4, 33, 3), (2, 9, 65))
    picks = dice.integers(-size[1], size[1], 6)
    return [
        numbers(dice, dtype, *size, low=-4, high=5),
        picks,
        numbers(dice, dtype, *size, low=-4, high=5),
        torch.rand(size, generator=dice.generator) > 0.5,
    ]


def _ordered(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """No value comes twice; rows and columns next to a block's size, or long."""
    small = (3, 17), (2, 33), (64, 2), (5, 31)
    long = (1, 1025), (2, 2049), (4097, 1), (3, 5000)
    wide = dtype.itemsize > 2 or dtype is torch.int16
    size = dice.among(*small, *(long if wide else ()))
    return [different(dice, dtype, *size)]


def _put(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> Any:
    """What is written by index, by mask and by slice."""
    found = [x.clone() for _ in range(8)]
    first = torch.arange(3, device=x.device)
    found[0][:, first] = y[:, first]
    found[1][m] = y[m]
    found[2][m] = 3
    found[3][..., 0, :] = y[..., 1, :]
    found[4][0, first, first] = y[1, first, first]
    found[5][:, 1::2].add_(y[:, 1::2])
    found[6].index_put_((first[:2, None], first), y[0, 0, 0], accumulate=True)
    found[7][-1:, :, -2:] = y[:1, :, :2]
    return found


def _in_place(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor, m: torch.Tensor) -> Any:
    """What is written into matrices that are turned, and into parts of others."""

    def turned() -> tuple[torch.Tensor, torch.Tensor]:
        whole = x[0].mT.contiguous()
        return whole, whole.mT

    def part() -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.cat([x[0], x[0], x[0]], 1)
        return whole, whole[:, x.shape[2] : -x.shape[2]]

    def done(whole: torch.Tensor, view: torch.Tensor, call: Any) -> torch.Tensor:
        call(view)
        return whole

    return [
        done(*made(), call)
        for made in (turned, part)
        for call in (
            lambda t: t.masked_fill_(m[0], 2),
            lambda t: t.masked_scatter_(m[0], y),
            lambda t: t.add_(y[0], alpha=2).mul_(y[0, 0]),
            lambda t: t.clamp_(-1, 2).copy_(y[0, :1]),
            lambda t: t.index_fill_(0, i[:2] % len(t), 1),
            lambda t: t.index_copy_(1, i[:1] % t.shape[1], y[0, :, :1]),
            lambda t: t.scatter_(1, m[0].long(), 3).scatter_add_(0, m[0].long(), y[0]),
            lambda t: t.zero_().fill_(5).sub_(y[0]),
        )
    ]


#: What moves elements.
MOVES: Final = (
    program(
        "reads by index",
        _cube,
        lambda x, i, y, m: x[:, i],
        lambda x, i, y, m: x[1, i, :, None],
        lambda x, i, y, m: x[i % len(x), :, i % x.shape[2]],
        lambda x, i, y, m: x[(i % len(x))[:, None], i],
        lambda x, i, y, m: x[m],
        lambda x, i, y, m: x[m[:, 0, 0]],
        lambda x, i, y, m: x[:, m[0, :, 0], 1:],
        lambda x, i, y, m: x.take(i.abs()),
        lambda x, i, y, m: x.index_select(1, (i % x.shape[1]).int()),
        lambda x, i, y, m: x.gather(0, m[:, :2].long()),
        lambda x, i, y, m: x.gather(-1, (i % x.shape[2]).expand(2, 3, -1)),
        lambda x, i, y, m: x.take_along_dim((i % x.shape[1]).view(1, -1, 1), 1),
        lambda x, i, y, m: (m.nonzero(as_tuple=True), m.argwhere(), x.nonzero()),
        lambda x, i, y, m: (x.select(1, -1) * 1, x.narrow(2, 1, 2) * 1, x.diagonal(1, 0, 2) * 1),
        dtypes=ALL,
    ),
    program(
        "writes by index",
        _cube,
        _put,
        _in_place,
        lambda x, i, y, m: x.scatter(2, m.long(), 2),
        lambda x, i, y, m: x.scatter_add(0, m.long(), y),
        lambda x, i, y, m: x.index_add(1, i % x.shape[1], y[:, :1].expand(-1, 6, -1), alpha=2),
        lambda x, i, y, m: x.index_fill(2, i[:2] % x.shape[2], 1),
        lambda x, i, y, m: x.index_add(0, (i[:3] % len(x)).int(), y[:1].expand(3, -1, -1)),
        lambda x, i, y, m: x.slice_scatter(y[:, :2], 1, 1, 5, 2),
        lambda x, i, y, m: x.select_scatter(y[:, 0], 1, 2),
        lambda x, i, y, m: torch.where(m, x, y[:1, :1]),
        lambda x, i, y, m: x.masked_scatter(m[:, :1], y),
        lambda x, i, y, m: x.masked_fill(m[..., :1], y[0, 0, 0].detach()),
        dtypes=NUMBERS,
    ),
    program(
        "orders",
        _ordered,
        lambda x: (x.sort(0), x.sort(-1, descending=True)),
        lambda x: (x.argsort(0, descending=True), x.argsort(-1), x.msort()),
        lambda x: (x.topk(2, -1), x.topk(x.shape[0], 0, largest=False)),
        lambda x: (x.argmax(-1), x.argmin(0, keepdim=True), x.argmax(), x.argmin()),
        lambda x: (x.max(0), x.min(-1, keepdim=True), x.median(-1), x.median(0).values),
        lambda x: (x.kthvalue(2, -1), x.flatten().kthvalue(3)),
        lambda x: (x.cummax(-1), x.cummin(0)),
        lambda x: [torch.searchsorted(x.sort(-1).values, x, right=r) for r in (False, True)],
        lambda x: torch.bucketize(x, x.flatten()[:9].sort().values),
        dtypes=NUMBERS,
    ),
    program(
        "sets",
        _ordered,
        lambda x: x.unique(return_inverse=True, return_counts=True),
        lambda x: (torch.isin(x, x[0]), torch.isin(x, x[:1, :0]), torch.isin(x, x[0], invert=True)),
        lambda x: (x.unique_consecutive(), x.unique(dim=0, return_inverse=True)),
        dtypes=NUMBERS,
        trained=False,
    ),
    program(
        "shapes",
        of_shapes((2, 6, 5), (2, 3)),
        lambda x, y: torch.cat([x.mT, x.mT[:0], x.mT[1:]], 0),
        lambda x, y: (torch.stack([x, x * 2], 1), torch.hstack([y, y]), torch.dstack([y, y])),
        lambda x, y: [one * 1 for one in (*x.split([1, 5], 1), *x.chunk(4, 2), *y.unbind(1))],
        lambda x, y: (x.permute(2, 0, 1).reshape(5, 12), x.movedim(0, 2).flatten(1)),
        lambda x, y: (x.roll(7), x.roll(-2, 1), x.flip(0, 1, 2), y.rot90(3), y.fliplr()),
        lambda x, y: [
            torch.stack([one.tril(n), one.triu(n)]) for one in (x, y, y.T) for n in _DIAGONALS
        ],
        lambda x, y: (y.diag_embed(1), y[0].diag(-1), x.diagonal(dim1=1, dim2=2).clone()),
        lambda x, y: (
            y.repeat(2, 1, 3),
            y.repeat_interleave(2, 1),
            y.tile(1, 2),
            y.expand(3, 2, 3) + 0,
        ),
        lambda x, y: torch.cartesian_prod(y[0], y[1]),
        lambda x, y: [one * 1 for one in torch.meshgrid(y[0], y[1], indexing="xy")],
        lambda x, y: (x.unfold(1, 3, 2) * 1, x.as_strided((3, 4), (5, 1), 2) * 1),
        lambda x, y: (x[None, :, ::2, -1].squeeze() * 1, y[..., None].expand(2, 3, 4).clone()),
        lambda x, y: (F.pad(x, (1, 2)), F.pad(y, (0, 1, 2, 0), value=1), y.new_zeros(2) + y[0, :2]),
        dtypes=NUMBERS,
    ),
)
