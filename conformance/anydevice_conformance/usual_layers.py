"""Usual operators that compute: products, convolutions, norms, pools, losses."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.usual_operator import (
    ALL,
    INTEGERS,
    NUMBERS,
    Make,
    different,
    numbers,
    of_shapes,
    rows_by_index,
    usual,
)

__all__ = ["LAYERS"]


_WIDE: Final = (torch.float32, torch.float64)


def _products(*letters: str) -> Make:
    """A tensor for each word, whose letters are sizes: the same one in all words."""

    def make(dice: Dice, dtype: torch.dtype) -> list[Any]:
        sizes = {letter: dice.among(1, 3, 5, 17, 33) for letter in sorted(set("".join(letters)))}
        return [numbers(dice, dtype, *(sizes[x] for x in word), low=-2, high=2) for word in letters]

    return make


def _pictures(dice: Dice, dtype: torch.dtype) -> list[Any]:
    return [different(dice, torch.float32, 1, dice.among(1, 2), 7, 9).to(dtype) / 8]


def _classes(dice: Dice, dtype: torch.dtype) -> list[Any]:
    rows, classes = dice.among(3, 17), dice.among(2, 9)
    return [numbers(dice, dtype, rows, classes, low=-3, high=3), dice.integers(0, classes, rows)]


def _chances(dice: Dice, dtype: torch.dtype) -> list[Any]:
    size = dice.among((3, 5), (17,))
    return [numbers(dice, dtype, *size, low=0.1, high=0.9) for _ in range(2)]


def _queries(dice: Dice, dtype: torch.dtype) -> list[Any]:
    q, k, width = dice.among(1, 5, 17), dice.among(3, 9), dice.among(4, 8)
    sizes = (2, 2, q, width), (2, 2, k, width), (2, 2, k, width)
    return [numbers(dice, dtype, *size, low=-2, high=2) for size in sizes]


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """Of what is not, torch 2.13 on the host leaves part of the gradient unwritten."""
    return (weight + 0).contiguous()


def _running(x: torch.Tensor, w: torch.Tensor) -> Any:
    """Training, and what it makes of the running mean and variance."""
    mean, variance = torch.zeros_like(w.detach()), torch.ones_like(w.detach())
    return F.batch_norm(x, mean, variance, _dense(w), training=True), mean, variance


def _in_use(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    dense = _dense(w)
    return F.batch_norm(x, dense.detach(), dense.detach().abs() + 1, dense, dense)


def _lstm(x: torch.Tensor, wi: torch.Tensor, wh: torch.Tensor, b: torch.Tensor) -> Any:
    start = torch.zeros(1, x.shape[1], 33, dtype=x.dtype, device=x.device)
    return torch.lstm(x, (start, start + 1), (wi, wh, b, b), True, 1, 0.0, False, False, False)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """With a mask of numbers, that is the same for all rows."""
    mask = torch.linspace(-2, 0, k.shape[-2], dtype=q.dtype, device=q.device)
    return F.scaled_dot_product_attention(q, k, v, mask.expand(q.shape[-2], -1))


def _masks(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Queries, keys and values, and a mask, which is broadcast to samples and heads."""
    q, k, v = _queries(dice, dtype)
    size = 2, 2, q.shape[-2], k.shape[-2]
    shape = dice.among(size, (2, 1, *size[2:]), (1, 2, *size[2:]), (2, 1, 1, size[3]), size[2:])
    mask = torch.rand(shape, generator=dice.generator) > 0.4
    mask[..., 0] = True
    return [q, k, v, mask if dice.among(True, False) else (mask.to(dtype) - 1) * 3]


def _normed(*more: tuple[int, ...]) -> Make:
    """Samples with channels, of one to three dimensions, and more for each channel."""

    def make(dice: Dice, dtype: torch.dtype) -> list[Any]:
        size = dice.among((2, 6, 5), (2, 6, 3, 5), (2, 6, 3, 5), (3, 6, 2, 2, 3), (2, 6))
        return [numbers(dice, dtype, *one, low=-2, high=2) for one in (size, *more)]

    return make


#: Products, layers and losses.
LAYERS: Final = (
    usual("mm", _products("ij", "jk"), torch.mm, *NUMBERS, supports_out=True),
    usual("bmm", _products("bij", "bjk"), torch.bmm, *NUMBERS, supports_out=True),
    usual("mv", _products("ij", "j"), torch.mv, *NUMBERS, supports_out=True),
    usual("dot", _products("i", "i"), torch.dot, *NUMBERS, supports_out=True),
    usual("outer", _products("i", "j"), torch.outer, *NUMBERS, supports_out=True),
    usual("addmm", _products("ik", "ij", "jk"), torch.addmm, *NUMBERS, supports_out=True),
    usual("addmv", _products("i", "ij", "j"), torch.addmv, supports_out=True),
    usual("addr", _products("ij", "i", "j"), torch.addr, supports_out=True),
    usual("baddbmm", _products("bik", "bij", "bjk"), torch.baddbmm, supports_out=True),
    usual("einsum", _products("bij", "bkj"), lambda x, y: torch.einsum("bij,bkj->bik", x, y)),
    usual("linear", _products("bij", "kj", "k"), F.linear),
    usual("bilinear", _products("bi", "bj", "kij"), F.bilinear),
    usual(
        "conv1d",
        of_shapes((2, 4, 11), (6, 2, 3), (6,)),
        lambda x, w, b: F.conv1d(x, w, b, 2, 1, 1, 2),
    ),
    usual(
        "conv2d",
        of_shapes((2, 3, 7, 9), (4, 3, 3, 2), (4,)),
        lambda x, w, b: F.conv2d(x, w, b, (2, 1), 1),
    ),
    usual("conv3d", of_shapes((1, 2, 3, 4, 5), (3, 2, 2, 3, 2)), lambda x, w: F.conv3d(x, w)),
    usual(
        "conv_transpose1d",
        of_shapes((2, 3, 5), (3, 2, 3)),
        lambda x, w: F.conv_transpose1d(x, w, None, 2),
    ),
    usual(
        "layer_norm", of_shapes((3, 17), (17,), (17,)), lambda x, w, b: F.layer_norm(x, (17,), w, b)
    ),
    usual(
        "layer_norm of two dimensions",
        lambda dice, dtype: of_shapes((4100, 2, 3), (2, 3), (2, 3))(dice, dtype),
        lambda x, w, b: F.layer_norm(x, (2, 3), w, b),
    ),
    usual(
        "grouped conv2d",
        of_shapes((3, 4, 5, 7), (4, 2, 3, 2)),
        lambda x, w: F.conv2d(x, w, None, 1, 1, 1, 2),
    ),
    usual(
        "depthwise conv2d",
        of_shapes((3, 4, 5, 7), (4, 1, 3, 3)),
        lambda x, w: F.conv2d(x, w, None, 2, 1, 1, 4),
    ),
    usual(
        "batch_norm in use",
        _normed((6,)),
        _in_use,
    ),
    usual("running batch_norm", _normed((6,)), _running),
    usual(
        "enlarged by a factor",
        _pictures,
        lambda x: F.interpolate(x, scale_factor=1.7, mode="bilinear"),
    ),
    usual(
        "lstm",
        of_shapes((3, 2, 5), (132, 5), (132, 33), (132,)),
        _lstm,
        torch.float32,
        torch.float64,
    ),
    usual(
        "rfft and back",
        of_shapes((2, 7)),
        lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, 7),
        torch.float32,
        torch.float64,
    ),
    usual(
        "norms of a list",
        of_shapes((3, 5), (7,)),
        lambda *x: torch.stack([*torch._foreach_norm(x, 2), *torch._foreach_norm(x, float("inf"))]),
    ),
    usual("masked attention", _queries, _attend),
    usual(
        "attention with masks",
        _masks,
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m.detach()),
    ),
    usual("rms_norm", of_shapes((3, 17), (17,)), lambda x, w: F.rms_norm(x, (17,), w)),
    usual("group_norm", _normed((6,), (6,)), lambda x, w, b: F.group_norm(x, 3, w, b)),
    usual(
        "instance_norm",
        lambda dice, dtype: of_shapes(dice.among((2, 3, 7), (2, 3, 4, 5)))(dice, dtype),
        lambda x: F.instance_norm(x),
    ),
    usual(
        "batch_norm",
        _normed((6,)),
        lambda x, w: F.batch_norm(x, None, None, _dense(w), training=True),
    ),
    usual("normalize", of_shapes((3, 7)), lambda x: F.normalize(x, dim=-1)),
    usual("cosine_similarity", of_shapes((3, 7), (3, 7)), lambda x, y: F.cosine_similarity(x, y)),
    usual("glu", of_shapes((3, 8)), lambda x: F.glu(x)),
    usual("prelu", of_shapes((2, 3, 5), (3,)), F.prelu),
    usual("max_pool1d", _pictures, lambda x: F.max_pool1d(x[0], 3, 2)),
    usual("max_pool2d", _pictures, lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)),
    usual("avg_pool2d", _pictures, lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    usual(
        "adaptive pools",
        _pictures,
        lambda x: (F.adaptive_avg_pool2d(x, 3), F.adaptive_max_pool2d(x, 2)),
    ),
    usual("nearest", _pictures, lambda x: F.interpolate(x, scale_factor=2)),
    usual("bilinear resize", _pictures, lambda x: F.interpolate(x, (5, 13), mode="bilinear")),
    usual("bicubic resize", _pictures, lambda x: F.interpolate(x, (9, 5), mode="bicubic")),
    usual(
        "reflect and replicate",
        _pictures,
        lambda x: (F.pad(x[0], (2, 1), "reflect"), F.pad(x[0], (1, 2), "replicate")),
    ),
    usual("unfold of pictures", _pictures, lambda x: F.unfold(x, 3, padding=1)),
    usual("pixel_shuffle", of_shapes((1, 8, 3, 2)), lambda x: F.pixel_shuffle(x, 2), *ALL),
    usual("embedding", rows_by_index, lambda x, i, v: F.embedding(i, x, padding_idx=1)),
    usual("embedding_bag", rows_by_index, lambda x, i, v: F.embedding_bag(i[None], x, mode="mean")),
    usual("one_hot", rows_by_index, lambda x, i, v: F.one_hot(i, 6), *INTEGERS, trained=False),
    usual("cross_entropy", _classes, lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)),
    usual("nll_loss", _classes, lambda x, t: F.nll_loss(x.log_softmax(-1), t, reduction="sum")),
    usual(
        "mse and l1",
        _chances,
        lambda x, y: (F.mse_loss(x, y), F.l1_loss(x, y), F.smooth_l1_loss(x, y)),
    ),
    usual("binary_cross_entropy", _chances, lambda x, y: F.binary_cross_entropy(x, y.detach())),
    usual("logits", _chances, lambda x, y: F.binary_cross_entropy_with_logits(x, y.detach())),
    usual("kl_div", _chances, lambda x, y: F.kl_div(x.log(), y.detach(), reduction="batchmean")),
    usual("attention", _queries, lambda q, k, v: F.scaled_dot_product_attention(q, k, v)),
    usual(
        "causal attention",
        _queries,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    ),
    usual(
        "cdist",
        of_shapes((3, 5), (4, 5)),
        lambda x, y: torch.cdist(x, y),
        torch.float32,
        torch.float64,
    ),
    usual(
        "cumulative product and differences", of_shapes((3, 7)), lambda x: (x.cumprod(-1), x.diff())
    ),
)
