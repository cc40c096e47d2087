"""Operations where kernels go wrong: factors, ties, NaN, repeated indices, long rows."""

from __future__ import annotations

import math
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.operation import A, I, N, Operation, P, R

__all__ = ["EDGES"]


def _long(dice: Dice) -> list[torch.Tensor]:
    inner = dice.among(1025, 2049, 4097)
    return [dice.floats(dice.among(1, 3), inner), dice.floats(inner, dice.among(1, 5))]


def _tall(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(dice.among(129, 257, 300), 5), dice.floats(5, dice.among(1, 3, 130))]


def _many_batches(dice: Dice) -> list[torch.Tensor]:
    batches = dice.among(17, 33, 65)
    return [dice.floats(batches, 3, 4), dice.floats(batches, 4, 5), dice.floats(batches, 3, 5)]


def _with_bias(dice: Dice) -> list[torch.Tensor]:
    rows, inner, columns = dice.size(), dice.size(), dice.size()
    return [dice.floats(rows, inner), dice.floats(inner, columns), dice.floats(rows, columns)]


def _heads(dice: Dice) -> list[torch.Tensor]:
    queries, width = dice.among(2, 5), dice.among(4, 8)
    shape = (2, 2, queries + dice.among(1, 9), width)
    return [dice.floats(2, 2, queries, width), dice.floats(*shape), dice.floats(*shape)]


def _heads_with_bias(dice: Dice) -> list[torch.Tensor]:
    q, k, v = _heads(dice)
    return [q, k, v, dice.floats(q.shape[-2], k.shape[-2])]


def _half_masked(dice: Dice) -> list[torch.Tensor]:
    """A key that would win altogether is masked, so that a mask that is only large shows."""
    q, k, v = _heads(dice)
    k[:, :, 0] = q[:, :, 0] * 5
    v[:, :, 0] = 50
    mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool)
    mask[:, 0] = False
    return [q, k, v, mask]


def _rows(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(dice.size(), dice.among(1, 3, 40), scale=dice.among(1.0, 20.0))]


def _large(dice: Dice) -> list[torch.Tensor]:
    """Whose sums are above float16's largest number, while their mean is not."""
    return [dice.floats(3, dice.among(300, 4097)) + 400.0]


def _far(dice: Dice) -> list[torch.Tensor]:
    """More elements than 2^16."""
    return [dice.floats(dice.among(65_537, 70_001, 140_000)) + 1.0]


def _answers(dice: Dice) -> list[torch.Tensor]:
    rows, classes = dice.among(5, 33), dice.among(2, 40)
    labels = dice.integers(0, classes, rows)
    labels[dice.among(0, 1, 2)] = -100
    return [dice.floats(rows, classes, scale=4.0), labels]


def _tied(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(0, 4, 3, dice.among(9, 40, 300)).float()]


def _nans(dice: Dice) -> list[torch.Tensor]:
    values = dice.floats(4, dice.among(5, 40))
    values[0, 2], values[1, 0], values[2, -1] = math.nan, math.inf, -math.inf
    return [values]


def _wide(dice: Dice) -> list[torch.Tensor]:
    """One row of different values, longer than a block."""
    count = dice.among(2500, 70_000)
    order = torch.randperm(count, generator=dice.generator)
    # The least and the largest lie far back, within 2^16: what lies beyond is DTY-017's.
    for value, place in ((0, min(count, 65_000) - 9), (count - 1, min(count, 65_000) - 2)):
        order[int((order == value).nonzero())], order[place] = order[place].clone(), value
    return [order.float(), dice.integers(0, count, dice.among(3, 1300))]


def _repeated(dice: Dice) -> list[torch.Tensor]:
    """A table, and indices of which many come again; values that add up exactly."""
    rows, width, count = dice.among(3, 17), dice.among(1, 5), dice.among(9, 40)
    return [
        dice.integers(-50, 50, rows, width).float(),
        dice.integers(0, rows, count),
        dice.integers(-50, 50, count, width).float(),
    ]


def _high_rows(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(66_000, 2), dice.integers(65_000, 66_000, dice.among(2, 9))]


def _cube(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(dice.among(1, 2), dice.among(3, 5), dice.among(4, 7), dice.among(3, 8))]


def _square(dice: Dice) -> list[torch.Tensor]:
    side = dice.among(3, 17, 33)
    return [dice.floats(side, side), dice.floats(side, side)]


def _int64(dice: Dice) -> list[torch.Tensor]:
    """A row of small numbers, and one of large ones."""
    count = dice.among(3, 40)
    return [
        torch.stack([dice.integers(-50, 50, count), dice.integers(-(2**31), 2**31, count)]),
        torch.stack([dice.integers(1, 50, count), dice.integers(1, 2**31, count)]),
    ]


def _bytes(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(0, 256, 2, dice.among(7, 40)).to(torch.uint8)]


def _scan(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.long().cumsum(0)


def _added(t: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return t.clone().index_put_((i,), v, accumulate=True)


def _scatter_added(t: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return t.scatter_add(0, i[:, None].expand_as(v), v)


def _in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found = x.clone()
    found.t().add_(y, alpha=2).mul_(0.5)
    found[1:].copy_(y[:-1])
    return found


def _stepped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    weights = x.detach().float().clone().requires_grad_()  # half types lose its epsilon
    optimizer = torch.optim.AdamW([weights], lr=0.1)
    for scale in (1.0, -0.5):
        weights.grad = (y.float() * scale).detach()
        optimizer.step()
    return weights.detach()


def _momentum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Two steps of SGD of two weights, with momentum and decay, and a norm that is cut."""
    weights = [t.detach().float().clone().requires_grad_() for t in (x, y[:1] - 2)]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9, weight_decay=0.3, nesterov=True)
    for scale in (1.0, -0.5):
        for weight in weights:
            weight.grad = (y.float()[: weight.shape[0]] * scale).detach()
        torch.nn.utils.clip_grad_norm_(weights, 1.5)
        optimizer.step()
    return torch.cat(weights).detach()


def _by_sign(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x % 0.75, x // 0.75, x.fmod(0.75), x.trunc(), x.round(), x.floor()])


#: Name to operation.
EDGES: Final[dict[str, Operation]] = {
    "matmul of long rows": Operation(P, lambda a, b: a @ b, _long, loose=2),
    "matmul of many rows": Operation(P, lambda a, b: a @ b, _tall),
    "matmul of many batches": Operation(P, lambda a, b, c: torch.bmm(a, b), _many_batches),
    "baddbmm with factors": Operation(
        P, lambda a, b, c: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), _many_batches, loose=2
    ),
    "addmm with factors": Operation(
        P, lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=2.0), _with_bias, loose=2
    ),
    "causal attention with more keys": Operation(
        A,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        _heads,
        loose=2,
    ),
    "attention with a bias": Operation(
        A, lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), _heads_with_bias, loose=2
    ),
    "attention without the best key": Operation(
        A, lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), _half_masked, loose=2
    ),
    "cross_entropy": Operation(
        N, lambda x, t: F.cross_entropy(x, t, reduction="none"), _answers, loose=4
    ),
    "mean cross_entropy": Operation(N, lambda x, t: F.cross_entropy(x, t), _answers, loose=4),
    "softplus and elu": Operation(N, lambda x: F.softplus(x) + F.elu(x), _rows, loose=4),
    "power": Operation(N, lambda x: (x / 8).pow(3) + x.abs().sqrt(), _rows, loose=4),
    "error function": Operation(N, lambda x: torch.erf(x), _rows, loose=2),
    "broadcast over heads": Operation(
        N, lambda x: x * x[:, :1] + x[:, :, :1] * x[..., :1], _cube, loose=4
    ),
    "logsumexp": Operation(N, lambda x: x.logsumexp(-1), _rows, loose=4),
    "norm": Operation(N, lambda x: x.norm(dim=-1), _rows, loose=4),
    "unbiased variance": Operation(R, lambda x: x.var(-1), _large, loose=30),
    "mean of large values": Operation(R, lambda x: x.mean(-1), _large, loose=2),
    "sum of many": Operation(R, lambda x: (x / 64).sum(), _far, loose=20),
    "count of many": Operation(R, lambda x: (x > -9).sum(), _far, exact=True),
    "argmax of many": Operation(I, lambda x, i: x.argmax(), _wide, exact=True),
    "any and all of floats": Operation(
        R, lambda x: torch.cat([x.any(-1), x.all(-1), (x * 0).any(-1)]), _rows, exact=True
    ),
    "largest with NaN": Operation(R, lambda x: x.amax(-1).isnan(), _nans, exact=True),
    "argmax with NaN": Operation(I, lambda x: x.argmax(-1), _nans, exact=True),
    "clamped NaN": Operation(
        I,
        lambda x: torch.cat(
            [x.clamp(-0.5, 0.5), x.clamp(min=0), F.relu(x), x.clamp(max=0)]
        ).isnan(),
        _nans,
        exact=True,
    ),
    "quotients by zero": Operation(
        I,
        lambda x: torch.cat([x / 0.0, x / (x * 0), 1.0 / (x * 0 + 0.0)]).isinf(),
        _nans,
        exact=True,
    ),
    "tests for NaN and infinity": Operation(
        I, lambda x: torch.cat([x.isnan(), x.isinf(), x.isfinite(), x != x]), _nans
    ),
    "masked by infinity": Operation(
        I, lambda x: x.nan_to_num().masked_fill(x > 0, -math.inf), _nans, exact=True
    ),
    "stable sort": Operation(I, lambda x: x.sort(dim=-1, stable=True).indices, _tied, exact=True),
    "long scan": Operation(R, _scan, _wide, exact=True),
    "long gather": Operation(I, lambda x, i: x.gather(0, i), _wide, exact=True),
    "many topk": Operation(I, lambda x, i: x.topk(257).indices, _wide, exact=True),
    "many nonzero": Operation(I, lambda x, i: (x > 9).nonzero(), _wide, exact=True),
    "place of the largest of many": Operation(
        I, lambda x, i: torch.stack([x.max(0).indices, x.min(0).indices]), _wide, exact=True
    ),
    "added by index": Operation(I, _added, _repeated, exact=True, trained=True),
    "index_add": Operation(
        I, lambda t, i, v: t.index_add(0, i, v), _repeated, exact=True, trained=True
    ),
    "scatter_add": Operation(I, _scatter_added, _repeated, exact=True, trained=True),
    "embedding of repeated rows": Operation(
        I, lambda t, i, v: F.embedding(i, t), _repeated, exact=True, trained=True
    ),
    "embedding of high rows": Operation(I, lambda t, i: F.embedding(i, t), _high_rows, exact=True),
    "repeat_interleave": Operation(
        I, lambda t, i, v: v.repeat_interleave(i, 0), _repeated, exact=True, needed=False
    ),
    "cat of many": Operation(
        I, lambda x, y: torch.cat([x[:1] + n for n in range(40)] + [x[:0], y]), _square, exact=True
    ),
    "two steps of AdamW": Operation(I, _stepped, _square, loose=4, needed=False),
    "two steps of SGD": Operation(I, _momentum, _square, loose=4, needed=False),
    "blend": Operation(I, lambda x, y: x.lerp(y, 0.3) + x.addcmul(y, y, value=0.5), _square),
    "flip of both": Operation(I, lambda x, y: x.flip(0, 1), _square, exact=True),
    "roll of both": Operation(I, lambda x, y: x.roll((1, -2), (0, 1)), _square, exact=True),
    "triangles": Operation(I, lambda x, y: x.tril(-1) + y.triu(2) + x.tril(1), _square, exact=True),
    "in place on a transposed view": Operation(I, _in_place, _square, exact=True),
    "heads moved together": Operation(
        I, lambda x: x.permute(0, 2, 1, 3).contiguous().flatten(2), _cube, exact=True
    ),
    "sum of a permuted cube": Operation(
        I, lambda x: x.permute(2, 0, 3, 1).contiguous() * 1, _cube, exact=True
    ),
    "floats by floor and remainder": Operation(I, _by_sign, _rows, exact=True),
    "product of int64": Operation(I, lambda x, y: x * y + x, _int64, exact=True),
    "quotient of int64": Operation(
        I,
        lambda x, y: torch.cat([x // y, x % y, x.div(y, rounding_mode="trunc")]),
        _int64,
        exact=True,
    ),
    "choice of int64": Operation(
        I, lambda x, y: torch.where(x > 0, x, y) + torch.maximum(x, y), _int64, exact=True
    ),
    "comparison of bytes": Operation(
        I, lambda x: torch.cat([x < x.flip(-1), x >= 128]), _bytes, exact=True
    ),
    "arange of large numbers": Operation(
        I,
        lambda x, y: torch.arange(2**24 + 1, 2**24 + 9, device=x.device) + 0 * x[0, :1],
        _int64,
        exact=True,
    ),
}
