"""Less usual operations: over several dimensions, without weights, of nothing, of ties."""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.operation import A, I, N, Operation, P, R

__all__ = ["MORE"]


def _cube(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(dice.among(2, 5), dice.among(3, 7), dice.among(2, 9))]


def _two_cubes(dice: Dice) -> list[torch.Tensor]:
    shape = dice.among(2, 5), dice.among(3, 7), dice.among(2, 9)
    return [dice.floats(*shape), dice.floats(*shape)]


def _positive(dice: Dice) -> list[torch.Tensor]:
    shape = dice.among(2, 5), dice.among(3, 17)
    return [dice.floats(*shape).abs() + 0.1, dice.floats(*shape)]


def _halves(dice: Dice) -> list[torch.Tensor]:
    """Multiples of a half: as many ties as not."""
    return [dice.integers(-20, 20, 3, dice.among(5, 33)).float() / 2]


def _with_nan(dice: Dice) -> list[torch.Tensor]:
    one, two = dice.floats(3, dice.among(5, 20)), dice.floats(3, 1)
    one[0, 1], two[2, 0] = math.nan, math.nan
    return [one, two]


def _padded(dice: Dice) -> list[torch.Tensor]:
    rows = dice.among(4, 17)
    ids = dice.integers(0, rows, 3, dice.among(3, 9))
    ids[:, 0] = 2
    return [dice.floats(rows, dice.among(1, 5)), ids]


def _picture(dice: Dice) -> list[torch.Tensor]:
    channels = dice.among(3, 4)
    return [dice.floats(2, channels, 7, 9), dice.floats(5, channels, 3, 3)]


def _masked(dice: Dice) -> list[torch.Tensor]:
    shape = 3, dice.among(5, 33)
    mask = torch.rand(shape, generator=dice.generator) > 0.5
    return [dice.integers(-90, 90, *shape).float(), mask, dice.integers(-90, 90, *shape).float()]


def _placed(dice: Dice) -> list[torch.Tensor]:
    columns = dice.among(5, 17)
    return [
        dice.integers(-90, 90, 3, columns).float(),
        dice.integers(0, columns, 3, columns),
        dice.integers(-90, 90, 3, columns).float(),
    ]


def _few(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(-3, 4, 3, dice.among(9, 33))]


def _shared(dice: Dice) -> list[torch.Tensor]:
    """Four heads of queries, two of keys and values."""
    q, k, width = dice.among(1, 5), dice.among(3, 9), dice.among(4, 8)
    return [dice.floats(2, 4, q, width), dice.floats(2, 2, k, width), dice.floats(2, 2, k, width)]


def _losses(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [
            F.mse_loss(x, y),
            F.l1_loss(x, y),
            F.smooth_l1_loss(x, y),
            F.huber_loss(x, y, delta=0.7),
            F.binary_cross_entropy_with_logits(x, y.detach().sigmoid()),
            F.kl_div(x.log_softmax(-1), y.detach().softmax(-1), reduction="batchmean"),
        ]
    )


def _rotated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As rotary positions: halves change places, and one of them its sign."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * y.cos() + turned * y[..., : turned.shape[-1]].sin()


def _written(x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found[mask] = y[mask]
    return torch.cat([found, x.masked_scatter(mask, y), x.clone().masked_fill_(~mask, 2.0)])


def _reduced(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.scatter_reduce(1, i, y, how) for how in ("amax", "amin", "sum")])


def _copied(x: torch.Tensor, i: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    order = i[0].argsort(stable=True)
    return torch.cat([x.index_copy(1, order, y), torch.take_along_dim(x, i, 1), x.take(i)])


def _views(x: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found.movedim(0, -1)[1:] += 1
    found.diagonal(dim1=0, dim2=2).mul_(3)
    found.select(1, 0).neg_()
    found[..., ::2].copy_(found[..., :1])
    return torch.cat(
        [found, x.rot90(2, (0, 2)), x.unfold(1, 2, 1)[..., 0].repeat(1, 2, 1)[:, : x.shape[1]]]
    )


def _of_nothing(x: torch.Tensor) -> torch.Tensor:
    none = x[:, :0]
    return torch.stack([none.sum(), none.prod(), none.sum(1).sum(), none.mean().nan_to_num(7.0)])


#: Name to operation. A device need not have them; where it has, they are right.
MORE: Final[dict[str, Operation]] = {
    "shared heads": Operation(
        A,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        _shared,
        loose=2,
        needed=False,
    ),
    "convolution of channels-last": Operation(
        P,
        lambda x, w: F.conv2d(x.contiguous(memory_format=torch.channels_last), w, padding=1),
        _picture,
        loose=2,
        needed=False,
    ),
    "products with broadcast": Operation(
        P, lambda x: x[:1] @ x.mT + x @ x[0, 0][:, None], _cube, loose=2, needed=False
    ),
    "softmax over the middle": Operation(
        N, lambda x: x.softmax(1) + x.log_softmax(0), _cube, loose=6, needed=False
    ),
    "layer_norm without weights": Operation(
        N,
        lambda x: F.layer_norm(x, x.shape[-1:]) + F.layer_norm(x, x.shape[1:]),
        _cube,
        loose=8,
        needed=False,
    ),
    "other activations": Operation(
        N,
        lambda x: F.leaky_relu(x) + F.hardswish(x) + F.mish(x) + F.logsigmoid(x) + F.selu(x),
        _cube,
        loose=6,
        needed=False,
    ),
    "losses": Operation(N, _losses, _two_cubes, loose=4, needed=False),
    "rotary positions": Operation(N, _rotated, _two_cubes, loose=4, needed=False),
    "roots and logarithms": Operation(
        N,
        lambda x, y: x.sqrt() + x.log1p() + x.log2() + x.reciprocal() + y.expm1() + y.atan(),
        _positive,
        loose=6,
        needed=False,
    ),
    "quotients and squares": Operation(
        N,
        lambda x, y: torch.addcdiv(y, y, x, value=0.5) + y / x + y.square(),
        _positive,
        loose=6,
        needed=False,
    ),
    "mean of two dimensions": Operation(R, lambda x: x.mean((0, 2)), _cube, loose=10, needed=False),
    "deviation of two dimensions": Operation(
        R,
        lambda x: x.std((1, 2)) + x.var((0, 1), correction=0).sum(),
        _cube,
        loose=30,
        needed=False,
    ),
    "sums of two dimensions": Operation(
        R,
        lambda x: x.sum((0, 1)) + x.sum((0, 2), keepdim=True).sum(),
        _cube,
        loose=20,
        needed=False,
    ),
    "cumulative product": Operation(R, lambda x: x.cumprod(1), _cube, loose=4, needed=False),
    "other norms": Operation(
        R,
        lambda x: x.norm(p=1, dim=1) + x.norm(p=math.inf, dim=1) + x.norm(p=2, dim=(1, 2))[:, None],
        _cube,
        loose=20,
        needed=False,
    ),
    "reductions of nothing": Operation(R, _of_nothing, _cube, exact=True, needed=False),
    "rounded halves": Operation(
        I,
        lambda x: torch.cat([x.round(), x.floor(), x.ceil(), x.sign(), x.frac()]),
        _halves,
        exact=True,
        needed=False,
    ),
    "larger and smaller with NaN": Operation(
        I,
        lambda x, y: torch.cat([torch.maximum(x, y), torch.minimum(x, y)]).isnan(),
        _with_nan,
        exact=True,
        needed=False,
    ),
    "logic of floats": Operation(
        I,
        lambda x: torch.cat(
            [x.logical_not(), x.logical_and(x.flip(-1)), x.logical_or(x.roll(1, -1))]
        ),
        _halves,
        exact=True,
        needed=False,
    ),
    "embedding with padding": Operation(
        I,
        lambda t, i: F.embedding(i, t, padding_idx=2),
        _padded,
        exact=True,
        needed=False,
        trained=True,
    ),
    "writes by mask": Operation(I, _written, _masked, exact=True, needed=False),
    "reductions by index": Operation(I, _reduced, _placed, exact=True, needed=False),
    "copies by index": Operation(I, _copied, _placed, exact=True, needed=False),
    "writes to views": Operation(I, _views, _cube, exact=True, needed=False),
    "unique values": Operation(I, lambda x: x.unique(), _few, exact=True, needed=False),
    "counts of values": Operation(
        I,
        lambda x: torch.cat([(x + 3).flatten().bincount(minlength=7), x.count_nonzero(1)]),
        _few,
        exact=True,
        needed=False,
    ),
    "sorted downwards": Operation(
        I,
        lambda x: x.sort(dim=-1, descending=True, stable=True).indices,
        _few,
        exact=True,
        needed=False,
    ),
    "largest so far": Operation(I, lambda x: x.cummax(-1).values, _few, exact=True, needed=False),
    "signs and remainders": Operation(
        I,
        lambda x: torch.cat(
            [x.abs(), x.sign(), x.fmod(2), x % -2, x // -2, x << 2, x.clamp(-1, 2)]
        ),
        _few,
        exact=True,
        needed=False,
    ),
    "two-dimensional places": Operation(
        I, lambda x: x[[0, 2, -1], [1, -1, 0]].repeat(2), _few, exact=True, needed=False
    ),
    "diagonals": Operation(
        I,
        lambda x: torch.cat(
            [x.diagonal(1), torch.diag_embed(x[:, :3]).flatten(), x[:3, :3].trace()[None]]
        ),
        _few,
        exact=True,
        needed=False,
    ),
}
