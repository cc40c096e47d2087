"""The operations that models compute: what each is given, and how exact it must be."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.operation import A, I, N, Operation, P, R
from anydevice_conformance.operations_edges import EDGES
from anydevice_conformance.operations_images import IMAGES
from anydevice_conformance.operations_more import MORE

__all__ = ["OPERATIONS"]


def _matrices(dice: Dice) -> list[torch.Tensor]:
    rows, inner, columns = dice.size(), dice.size(), dice.size()
    return [dice.floats(rows, inner), dice.floats(inner, columns)]


def _batches(dice: Dice) -> list[torch.Tensor]:
    batch, rows, inner, columns = dice.among(1, 2, 5), dice.size(), dice.size(), dice.size()
    return [dice.floats(batch, rows, inner), dice.floats(batch, inner, columns)]


def _linear(dice: Dice) -> list[torch.Tensor]:
    rows, inner, columns = dice.size(), dice.size(), dice.size()
    return [dice.floats(2, rows, inner), dice.floats(columns, inner), dice.floats(columns)]


def _queries(dice: Dice) -> list[torch.Tensor]:
    batch, heads, width = dice.among(1, 2), dice.among(1, 2, 4), dice.among(8, 17, 64, 128)
    queries, keys = dice.among(1, 3, 8, 33), dice.among(3, 8, 33, 70)
    return [
        dice.floats(batch, heads, queries, width),
        dice.floats(batch, heads, keys, width),
        dice.floats(batch, heads, keys, width),
    ]


def _square_queries(dice: Dice) -> list[torch.Tensor]:
    length, width = dice.among(2, 16, 33, 65), dice.among(8, 17, 64)
    return [dice.floats(2, 2, length, width) for _ in range(3)]


def _masked_queries(dice: Dice) -> list[torch.Tensor]:
    """With a mask for each sample and head."""
    heads, width = dice.among(2, 4), dice.among(4, 8, 16, 17)
    queries, keys = dice.among(1, 3, 8, 33), dice.among(3, 8, 33, 70)
    q, k, v = (dice.floats(2, heads, length, width) for length in (queries, keys, keys))
    mask = torch.rand(2, heads, queries, keys, generator=dice.generator) > 0.4
    mask[..., int(dice.integers(0, keys))] = True
    return [q, k, v, mask]


def _masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """By the mask, and where it is broadcast over samples, heads or queries, or has no samples."""
    masks = [mask, mask[:, :1], mask[:1], mask[:1, :1], mask[:, :1, :1], mask[0, 0]]
    return torch.cat([_sdpa(q, k, v, attn_mask=each) for each in masks])


def _grouped(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    wide = q.repeat_interleave(2, dim=1)
    return F.scaled_dot_product_attention(
        wide, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    )


def _rows(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(dice.size(), dice.size(), scale=dice.among(1.0, 1.0, 30.0))]


def _shifted(dice: Dice) -> list[torch.Tensor]:
    """Far from zero, where an unshifted exponential overflows."""
    rows = dice.size()
    shifts = torch.tensor([90.0, 0.0, -120.0]).repeat(rows)[:rows, None]
    return [dice.floats(rows, dice.size(), scale=3.0) + shifts]


def _scaled_rows(dice: Dice) -> list[torch.Tensor]:
    width = dice.size()
    return [dice.floats(3, width), dice.floats(width), dice.floats(width)]


def _small_rows(dice: Dice) -> list[torch.Tensor]:
    """So small that the epsilon counts."""
    width = dice.size()
    return [dice.floats(3, width, scale=2e-3), dice.floats(width), dice.floats(width)]


def _many(dice: Dice) -> list[torch.Tensor]:
    return [dice.floats(dice.among(1, 2, 7), dice.among(1, 33, 1000, 4097))]


def _bytes(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(0, 256, 3, dice.among(1, 40, 1000)).to(torch.uint8)]


def _int32(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(2**29, 2**31, 3, dice.among(2, 40)).to(torch.int32)]


def _int8(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(-128, 128, 3, dice.among(2, 40, 1000)).to(torch.int8)]


def _bools(dice: Dice) -> list[torch.Tensor]:
    return [torch.rand(4, dice.among(3, 300, 1000), generator=dice.generator) > 0.3]


def _int64(dice: Dice) -> list[torch.Tensor]:
    return [dice.integers(-(2**40), 2**40, 5, dice.among(2, 40))]


def _ties(dice: Dice) -> list[torch.Tensor]:
    """Values that are all different, so that each order is the only one."""
    count = dice.among(2, 33, 257)
    order = torch.randperm(count * 3, generator=dice.generator).reshape(3, count)
    return [order.float() - count]


def _table(dice: Dice) -> list[torch.Tensor]:
    rows, width = dice.among(3, 17, 300), dice.among(1, 4, 33)
    return [dice.floats(rows, width), dice.integers(-rows, rows, dice.among(1, 9))]


def _lookup(dice: Dice) -> list[torch.Tensor]:
    rows, width = dice.among(3, 17, 300), dice.among(1, 4, 33)
    return [dice.integers(0, rows, 2, dice.among(1, 9)), dice.floats(rows, width)]


def _gathered(dice: Dice) -> list[torch.Tensor]:
    columns = dice.among(2, 17)
    return [dice.floats(4, columns), dice.integers(0, columns, 4, dice.among(1, 5))]


def _masked(dice: Dice) -> list[torch.Tensor]:
    shape = dice.among(1, 5), dice.among(3, 40)
    return [dice.floats(*shape), torch.rand(shape, generator=dice.generator) > 0.5]


def _two(dice: Dice) -> list[torch.Tensor]:
    rows, columns = dice.size(), dice.size()
    return [dice.floats(rows, columns), dice.floats(dice.among(1, rows), columns)]


def _scattered(dice: Dice) -> list[torch.Tensor]:
    columns = dice.among(5, 17)
    order = torch.randperm(columns, generator=dice.generator)[:3]
    return [dice.floats(2, columns), order.expand(2, 3).contiguous(), dice.floats(2, 3)]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


#: Name to operation. Functions are looked up when they are called: a device may replace them.
OPERATIONS: Final[dict[str, Operation]] = {
    "matmul": Operation(P, lambda a, b: torch.matmul(a, b), _matrices),
    "batched matmul": Operation(P, lambda a, b: torch.matmul(a, b), _batches),
    "matmul of one matrix for all batches": Operation(P, lambda a, b: a @ b[0], _batches),
    "linear": Operation(P, lambda x, w, b: F.linear(x, w, b), _linear),
    "linear without bias": Operation(P, lambda x, w, b: F.linear(x, w), _linear),
    "addmm": Operation(P, lambda x, w, b: torch.addmm(b, x[0], w.t()), _linear),
    "matrix by vector": Operation(P, lambda a, b: a @ b[:, 0], _matrices),
    "einsum": Operation(P, lambda a, b: torch.einsum("bij,bjk->bki", a, b), _batches),
    "outer product": Operation(P, lambda a, b: torch.outer(a[:, 0], b[0]), _matrices),
    "attention": Operation(A, lambda q, k, v: _sdpa(q, k, v), _queries, loose=2),
    "causal attention": Operation(
        A, lambda q, k, v: _sdpa(q, k, v, is_causal=True), _square_queries, loose=2
    ),
    "masked attention": Operation(
        A, lambda q, k, v, m: _masked_attention(q, k, v, m), _masked_queries, loose=2
    ),
    "attention with a scale": Operation(
        A, lambda q, k, v: _sdpa(q, k, v, scale=0.7), _queries, loose=3
    ),
    "grouped attention": Operation(A, _grouped, _queries, loose=2),
    "attention by hand": Operation(
        A, lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v, _queries, loose=3
    ),
    "softmax": Operation(N, lambda x: torch.softmax(x, -1), _shifted, loose=6),
    "softmax over rows": Operation(N, lambda x: torch.softmax(x, 0), _shifted, loose=6),
    "log_softmax": Operation(N, lambda x: torch.log_softmax(x, -1), _shifted, loose=6),
    "softmax in float32": Operation(
        N, lambda x: torch.softmax(x, -1, dtype=torch.float32), _rows, loose=2
    ),
    "layer_norm": Operation(
        N, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), _scaled_rows, loose=4
    ),
    "layer_norm of small values": Operation(
        N, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, eps=1e-5), _small_rows, loose=10
    ),
    "rms_norm": Operation(
        N,
        lambda x, w, b: w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
        _small_rows,
        loose=6,
    ),
    "gelu": Operation(N, lambda x: F.gelu(x), _rows, loose=2),
    "gelu by tanh": Operation(N, lambda x: F.gelu(x, approximate="tanh"), _rows, loose=2),
    "silu": Operation(N, lambda x: F.silu(x), _rows, loose=2),
    "relu": Operation(N, lambda x: F.relu(x), _rows),
    "tanh": Operation(N, lambda x: torch.tanh(x), _rows, loose=2),
    "sigmoid": Operation(N, lambda x: torch.sigmoid(x), _rows, loose=2),
    "exp": Operation(N, lambda x: torch.exp(x / 40), _rows, loose=2),
    "rsqrt": Operation(N, lambda x: torch.rsqrt(x.abs() + 0.5), _rows, loose=2),
    "sin and cos": Operation(N, lambda x: torch.sin(x) + torch.cos(x), _rows, loose=4),
    "log": Operation(N, lambda x: torch.log(x.abs() + 1), _rows, loose=2),
    "sum": Operation(R, lambda x: x.sum(), _many, loose=20),
    "sum of rows": Operation(R, lambda x: x.sum(-1), _many, loose=20),
    "sum of columns": Operation(R, lambda x: x.sum(0), _many, loose=4),
    "mean": Operation(R, lambda x: x.mean(-1, keepdim=True), _many, loose=20),
    "variance": Operation(R, lambda x: x.var(-1, unbiased=False), _many, loose=20),
    "largest": Operation(R, lambda x: x.amax(-1), _many, exact=True),
    "least": Operation(R, lambda x: x.amin(0), _many, exact=True),
    "cumulative sum": Operation(R, lambda x: x.cumsum(-1), _many, loose=20),
    "sum of bytes": Operation(R, lambda x: x.sum(-1), _bytes, exact=True),
    "sum of int8": Operation(R, lambda x: x.sum(), _int8, exact=True),
    "sum of int32": Operation(R, lambda x: x.sum(-1), _int32, exact=True),
    "sum of int64": Operation(R, lambda x: x.sum(0), _int64, exact=True),
    "extremes of int64": Operation(
        R,
        lambda x: torch.cat([x.amax(-1), x.amin(-1), (-1 - x.abs()).amax(-1), x.abs().amin(-1)]),
        _int64,
        exact=True,
    ),
    "sum of bools": Operation(R, lambda x: x.sum(), _bools, exact=True),
    "cumulative sum of bools": Operation(R, lambda x: x.cumsum(-1), _bools, exact=True),
    "cumulative sum of int64": Operation(R, lambda x: x.cumsum(-1), _int64, exact=True),
    "product of int8": Operation(R, lambda x: x[:, :4].prod(-1), _int8, exact=True),
    "any": Operation(R, lambda x: x.any(-1), _bools, exact=True),
    "all": Operation(R, lambda x: x.all(0), _bools, exact=True),
    "argmax": Operation(I, lambda x: x.argmax(-1), _ties, exact=True),
    "argmax of all": Operation(I, lambda x: x.argmax(), _ties, exact=True),
    "argmin": Operation(I, lambda x: x.argmin(0), _ties, exact=True),
    "largest with place": Operation(I, lambda x: x.max(-1).indices, _ties, exact=True),
    "argsort": Operation(I, lambda x: x.argsort(-1, descending=True), _ties, exact=True),
    "sort": Operation(I, lambda x: x.sort(-1).values, _ties, exact=True),
    "topk": Operation(I, lambda x: x.topk(2, -1).indices, _ties, exact=True),
    "rows by index": Operation(I, lambda t, i: t[i], _table, exact=True),
    "columns by index": Operation(I, lambda t, i: t.t()[:, i], _table, exact=True),
    "index_select": Operation(I, lambda i, t: t.index_select(0, i[0]), _lookup, exact=True),
    "embedding": Operation(I, lambda i, t: F.embedding(i, t), _lookup, exact=True),
    "gather": Operation(I, lambda x, i: x.gather(1, i), _gathered, exact=True),
    "scatter": Operation(I, lambda x, i, v: x.scatter(1, i, v), _scattered, exact=True),
    "rows written by index": Operation(
        I, lambda t, i: t.clone().index_fill_(0, i.remainder(t.shape[0]), 7.0), _table, exact=True
    ),
    "boolean index": Operation(I, lambda x, m: x[m], _masked, exact=True),
    "boolean write": Operation(I, lambda x, m: x.masked_fill(m, -1.5), _masked, exact=True),
    "where": Operation(I, lambda x, m: torch.where(m, x, -x), _masked, exact=True),
    "nonzero": Operation(I, lambda x, m: m.nonzero(), _masked, exact=True),
    "negative index": Operation(I, lambda x: x[-1] + x[:, -2:].sum() * 0, _ties, exact=True),
    "step": Operation(I, lambda x: x[:, ::2].clone(), _ties, exact=True),
    "flip": Operation(I, lambda x: x.flip(-1), _ties, exact=True),
    "roll": Operation(I, lambda x: x.roll(1, -1), _ties, exact=True),
    "cat": Operation(I, lambda x, y: torch.cat([x, y], 0), _two, exact=True),
    "stack": Operation(I, lambda x, y: torch.stack([x, x + 1], 1), _two, exact=True),
    "split": Operation(I, lambda x, y: x.chunk(2, -1)[-1].clone(), _two, exact=True),
    "repeat": Operation(I, lambda x, y: y.repeat(2, 3), _two, exact=True),
    "broadcast": Operation(I, lambda x, y: x + y[:1], _two, exact=True),
    "greater": Operation(I, lambda x, y: x > y[:1], _two, exact=True),
    "greater of int64": Operation(I, lambda x: x >= x.flip(-1), _int64, exact=True),
    "equal of int64": Operation(I, lambda x: x == x + 1, _int64, exact=True),
    "division of int64": Operation(
        I, lambda x: torch.div(x, 7, rounding_mode="floor"), _int64, exact=True
    ),
    "remainder of int64": Operation(I, lambda x: x % 7, _int64, exact=True),
    "bitwise": Operation(I, lambda x: (x & 0xFF) ^ (x >> 3), _int64, exact=True),
    "not": Operation(I, lambda x: ~x, _bools, exact=True),
    "triangle": Operation(I, lambda x, y: torch.triu(x, 1), _two, exact=True),
    "triangle of infinities": Operation(
        I, lambda x, y: torch.triu(torch.full_like(x, -torch.inf), 1), _two, exact=True
    ),
    "arange": Operation(
        I, lambda x: torch.arange(x.shape[1], device=x.device) + 0 * x[0], _int64, exact=True
    ),
    "filled": Operation(I, lambda x: torch.full_like(x, 9) + x, _int64, exact=True),
    "clamp": Operation(I, lambda x, y: x.clamp(-0.5, 0.5), _two, exact=True),
    "contiguous": Operation(I, lambda x, y: x.t().contiguous().view(-1), _two, exact=True),
    **EDGES,
    **IMAGES,
    **MORE,
}
