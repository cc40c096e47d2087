"""Pools, pads, resampling, norms and losses with the options that models give them."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.programs_of_operators import program
from anydevice_conformance.usual_operator import (
    WIDE_FLOATS,
    different,
    numbers,
    of_shapes,
)

__all__ = ["LAYERS_WITH_OPTIONS"]


def _pictures(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Two channels of a small picture, a row, and a cube, in all of which no value comes twice."""
    sizes = (2, 2, 7, 9), (2, 2, 37), (1, 2, 4, 5, 6)
    count = 256 if dtype.itemsize < 4 else 1 << 12
    scale = 8 if dtype.itemsize < 4 else 128
    return [
        (different(dice, torch.float32, *size) % count - count // 2).to(dtype) / scale
        for size in sizes
    ]


def _rows(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Rows next to a block's size, and long ones."""
    size = dice.among((3, 127), (5, 1025), (2, 4099), (2, 3, 65), (4099, 3), (1, 33))
    return [
        numbers(dice, dtype, *size, low=-3, high=3),
        numbers(dice, dtype, size[-1], low=0.5, high=2),
    ]


def _channels(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Samples of 6 channels with one to three other dimensions, one of them at times long."""
    some = (2, 6, 5), (2, 6, 3, 5), (3, 6, 7, 1), (1, 6, 2, 3, 4), (2, 6, 1031), (70, 6, 2, 2)
    size = dice.among(*some)
    return [
        numbers(dice, dtype, *size, low=-2, high=2),
        numbers(dice, dtype, 6, low=0.5, high=2),
    ]


def _running(x: torch.Tensor, w: torch.Tensor) -> Any:
    """What training makes of the means and variances, by two steps, and then their use."""
    mean, variance, dense = torch.zeros_like(w.detach()), torch.ones_like(w.detach()), w * 1
    for scale in (1, 3):
        F.batch_norm(x * scale, mean, variance, None, None, True, 0.3)
    used = F.batch_norm(x, mean.clone(), variance.clone(), dense, None, False, 0.0, 1e-3)
    return mean, variance, used


def _logits(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Logits, classes of which some are ignored, weights of classes, and chances of them."""
    rows, classes = dice.among((6, 130), (66, 3), (10, 33), (300, 5))
    labels = dice.integers(0, classes, rows)
    labels[1::4] = -100
    chances = numbers(dice, torch.float32, rows, classes, low=0.1, high=2)
    return [
        numbers(dice, dtype, rows, classes, low=-3, high=3),
        labels,
        numbers(dice, dtype, classes, low=0.2, high=2),
        (chances / chances.sum(-1, keepdim=True)).to(dtype),
    ]


def _image_loss(x: torch.Tensor, t: torch.Tensor, w: torch.Tensor, p: torch.Tensor) -> Any:
    """Of pictures: the classes stand before the places."""
    rows, classes = x.shape
    there = x.view(2, rows // 2, classes).mT.unsqueeze(2)
    where = t.view(2, 1, rows // 2)
    return [
        F.cross_entropy(there, where, reduction=reduction, ignore_index=ignored)
        for reduction in ("mean", "none", "sum")
        for ignored in (-100,)
    ]


def _ids(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """A table, ids of which some come again, and where bags begin."""
    rows = dice.among(5, 300)
    ids = dice.integers(0, rows, dice.among(7, 66))
    ids[1::3] = 2
    return [numbers(dice, dtype, rows, dice.among(3, 8)), ids, torch.tensor([0, 3, 3, 5])]


def _long_samples(dice: Dice, dtype: torch.dtype) -> list[Any]:
    return [numbers(dice, dtype, 1, 2, 66_001)]


#: Layers.
LAYERS_WITH_OPTIONS: Final = (
    program(
        "pools with options",
        _pictures,
        lambda x, y, z: F.max_pool2d(x, 3, 1, 1),
        lambda x, y, z: F.max_pool2d(x, (2, 3), (2, 1), (1, 0), (1, 2), return_indices=True),
        lambda x, y, z: F.max_pool1d(y, 4, 3, 1, ceil_mode=True, return_indices=True),
        lambda x, y, z: F.max_pool3d(z, (2, 3, 2), 2, (1, 1, 0), return_indices=True),
        lambda x, y, z: F.adaptive_max_pool2d(x, (3, 4), return_indices=True),
        lambda x, y, z: F.adaptive_max_pool1d(y, 5),
        lambda x, y, z: F.avg_pool3d(z, (2, 3, 2), (1, 2, 2), (1, 1, 0), count_include_pad=False),
        lambda x, y, z: F.adaptive_avg_pool3d(z, (2, 2, 5)),
        lambda x, y, z: F.local_response_norm(x, 3),
        lambda x, y, z: F.multi_margin_loss(y[0], torch.arange(2, device=y.device)),
        lambda x, y, z: F.max_unpool2d(*F.max_pool2d(x[..., :8], 2, return_indices=True), (2, 2)),
        dtypes=WIDE_FLOATS,
    ),
    program(
        "mean pools with options",
        _pictures,
        lambda x, y, z: F.avg_pool2d(x, 3, 2, 1),
        lambda x, y, z: F.avg_pool2d(x, (3, 2), 2, 1, True, False),
        lambda x, y, z: F.avg_pool2d(x, 2, 1, divisor_override=3),
        lambda x, y, z: F.avg_pool1d(y, 5, 2, 2, True),
        lambda x, y, z: F.adaptive_avg_pool2d(x, (3, 4)),
        lambda x, y, z: F.adaptive_avg_pool2d(x, (None, 1)),
        lambda x, y, z: F.adaptive_avg_pool1d(y, 5),
        lambda x, y, z: F.lp_pool2d(x.abs() + 0.1, 2, 2),
    ),
    program(
        "pads with options",
        _pictures,
        lambda x, y, z: F.pad(x, (2, 1, 0, 3), mode="reflect"),
        lambda x, y, z: F.pad(x, (2, 1, 0, 3), mode="replicate"),
        lambda x, y, z: F.pad(x, (2, 1, 0, 3), mode="circular"),
        lambda x, y, z: [F.pad(y, (5, 9), mode=mode) for mode in ("reflect", "replicate")],
        lambda x, y, z: [F.pad(z, (1, 2, 1, 0, 2, 1), mode=m) for m in ("reflect", "replicate")],
        lambda x, y, z: F.pad(x, (-1, 2, 1, -2), value=-3),
        lambda x, y, z: F.pad(y, (1, 0, 0, 1, 2, 0), value=0.5),
        lambda x, y, z: F.pad(x[0], (1, 1, 2, 2), mode="reflect"),
    ),
    program("pad of long samples", _long_samples, lambda x: F.pad(x, (9, 5), mode="reflect")),
    program(
        "layers of long samples",
        _long_samples,
        lambda x: F.pad(x, (9, 5), mode="replicate"),
        lambda x: F.pad(x, (1, 2)),
        lambda x: F.max_pool1d(x + torch.arange(66_001, device=x.device) % 7, 7, 3),
        lambda x: F.interpolate(x, scale_factor=2.0),
        lambda x: x.unfold(-1, 400, 160).mean(-1),
        lambda x: (F.layer_norm(x.mT, (2,)), F.group_norm(x, 1), F.instance_norm(x)),
        lambda x: (x.softmax(-1), x.mT.softmax(-1), x.log_softmax(1), F.normalize(x, dim=1)),
        lambda x: (F.avg_pool1d(x, 5, 4), F.adaptive_avg_pool1d(x, 7), F.glu(x, 1)),
        dtypes=WIDE_FLOATS,
        slow=True,
    ),
    program(
        "interpolate with options",
        _pictures,
        lambda x, y, z: F.interpolate(x, (4, 13)),
        lambda x, y, z: F.interpolate(x, (14, 5), mode="nearest-exact"),
        lambda x, y, z: F.interpolate(x, (13, 4), mode="bilinear", align_corners=True),
        lambda x, y, z: F.interpolate(x, (3, 20), mode="bilinear"),
        lambda x, y, z: F.interpolate(x, (13, 5), mode="bicubic"),
        lambda x, y, z: F.interpolate(x, (3, 4), mode="bilinear", antialias=True),
        lambda x, y, z: F.interpolate(x, (5, 4), mode="bicubic", antialias=True),
        lambda x, y, z: F.interpolate(x, (3, 4), mode="area"),
        lambda x, y, z: F.interpolate(y, 50, mode="linear", align_corners=True),
        lambda x, y, z: F.interpolate(z, (5, 3, 9), mode="trilinear", align_corners=True),
        lambda x, y, z: F.interpolate(z, scale_factor=2.0),
        dtypes=WIDE_FLOATS,
    ),
    program(
        "grid_sample with options",
        _pictures,
        *(
            lambda x, y, z, m=mode, p=padding, a=corners: F.grid_sample(
                x, _grid(x), mode=m, padding_mode=p, align_corners=a
            )
            for mode, padding, corners in (
                ("bilinear", "border", True),
                ("bilinear", "reflection", False),
                ("bicubic", "zeros", True),
            )
        ),
        lambda x, y, z: F.affine_grid(x[:, 0, :2, :3], [2, 2, 3, 5], align_corners=False),
        dtypes=WIDE_FLOATS,
        slow=True,
    ),
    program(
        "places within pictures",
        of_shapes((2, 8, 4, 6), (1, 18, 12)),
        lambda x, y: F.pixel_shuffle(x, 2),
        lambda x, y: F.pixel_unshuffle(x, 2),
        lambda x, y: F.channel_shuffle(x, 4),
        lambda x, y: F.unfold(x, (2, 3), (1, 2), (1, 0), (2, 1)),
        lambda x, y: F.fold(y, (4, 5), (3, 3), 1, 1, 2) if y.shape[-1] == 99 else y.mT * 1,
        lambda x, y: F.glu(x, 1),
    ),
    program(
        "norms of rows",
        _rows,
        lambda x, w: F.layer_norm(x, x.shape[-1:], w, w * 2, 1e-3),
        lambda x, w: F.layer_norm(x, x.shape[-1:], w),
        lambda x, w: F.layer_norm(x, x.shape[1:]),
        lambda x, w: F.rms_norm(x, x.shape[-1:], w, 1e-3),
        lambda x, w: (F.rms_norm(x / 4096, x.shape[-1:]), F.rms_norm(x, x.shape[1:], None)),
        lambda x, w: F.layer_norm(x / 512, x.shape[-1:], w),
        lambda x, w: (F.normalize(x, 1.0, 0), F.normalize(x, dim=-1)),
    ),
    program(
        "softmax of rows",
        _rows,
        lambda x, w: x.softmax(-1),
        lambda x, w: x.softmax(0),
        lambda x, w: (x * w).log_softmax(-1),
        lambda x, w: x.log_softmax(0),
        lambda x, w: x.masked_fill(x > 1.5, -torch.inf).softmax(-1).nan_to_num(7),
        lambda x, w: (x * 4 - 9).logsumexp(-1),
        lambda x, w: x.logsumexp((0, -1), keepdim=True),
    ),
    program(
        "group_norm with options",
        _channels,
        lambda x, w: F.group_norm(x, 3, w, w * 2, 1e-3),
        lambda x, w: F.group_norm(x, 1),
        lambda x, w: F.group_norm(x, 6, w),
    ),
    program(
        "batch_norm with options",
        _channels,
        lambda x, w: F.batch_norm(x, None, None, w * 1, w * 2, True, 0.1, 1e-3),
        _running,
        lambda x, w: F.instance_norm(x, weight=w * 1, bias=w * 2) if x.shape[2:].numel() > 1 else x,
    ),
    program(
        "losses of classes with options",
        _logits,
        lambda x, t, w, p: F.cross_entropy(x, t, w.detach(), label_smoothing=0.2),
        lambda x, t, w, p: F.cross_entropy(x, t, reduction="sum"),
        lambda x, t, w, p: F.cross_entropy(x, p.detach()),
        lambda x, t, w, p: F.cross_entropy(x, t.clamp(min=0), ignore_index=1, reduction="mean"),
        lambda x, t, w, p: F.nll_loss(x.log_softmax(-1), t, w.detach(), reduction="mean"),
        lambda x, t, w, p: F.one_hot(t.clamp(min=0)).sum(0),
        _image_loss,
    ),
    program(
        "other losses with options",
        _logits,
        lambda x, t, w, p: F.binary_cross_entropy_with_logits(
            x, p.detach(), w.detach(), pos_weight=w.detach() * 2
        ),
        lambda x, t, w, p: F.binary_cross_entropy(x.sigmoid(), p.detach(), reduction="sum"),
        lambda x, t, w, p: F.kl_div(x.log_softmax(-1), p, reduction="batchmean"),
        lambda x, t, w, p: F.kl_div(x.log_softmax(-1), p.log(), log_target=True, reduction="none"),
        lambda x, t, w, p: F.mse_loss(x, p, reduction="none").sum(-1),
        lambda x, t, w, p: (F.l1_loss(x, p), F.mse_loss(x, p), F.smooth_l1_loss(x, p, beta=0.3)),
        lambda x, t, w, p: F.huber_loss(x, p, reduction="sum", delta=2.0),
        lambda x, t, w, p: (F.cosine_similarity(x, p, 0), F.pairwise_distance(x, p)),
        lambda x, t, w, p: F.triplet_margin_loss(x, p, w.expand_as(x)),
        lambda x, t, w, p: F.hinge_embedding_loss(x, (p.detach() > 0.1) * 2 - 1),
        lambda x, t, w, p: F.margin_ranking_loss(x, p, w.detach().sign().expand_as(x), margin=0.5),
        lambda x, t, w, p: F.poisson_nll_loss(x, p),
    ),
    program(
        "embeddings with options",
        _ids,
        lambda x, i, o: F.embedding(i, x, padding_idx=2),
        lambda x, i, o: F.embedding((i + 1) % len(x), x, padding_idx=-1),
        lambda x, i, o: F.embedding(i, x, padding_idx=0),
        lambda x, i, o: F.embedding(i, x, scale_grad_by_freq=True),
        lambda x, i, o: F.embedding(i.int(), x),
        lambda x, i, o: F.embedding(i[:6].view(2, 1, 3), x),
        lambda x, i, o: F.embedding_bag(i, x, o, mode="sum"),
        lambda x, i, o: F.embedding_bag(i, x, o, mode="mean"),
        lambda x, i, o: F.embedding_bag(
            i, x, o[:2], mode="sum", per_sample_weights=x[:1, 0].expand(len(i))
        ),
        lambda x, i, o: F.embedding_bag(i, x, o, mode="max"),
        lambda x, i, o: F.embedding(i, x[:, :2]),
        lambda x, i, o: F.linear(F.embedding(i, x), x),
        dtypes=WIDE_FLOATS,
    ),
)


def _grid(x: torch.Tensor) -> torch.Tensor:
    """Places to look at, some of them outside."""
    steps = torch.linspace(-1.3, 1.2, 24, dtype=x.dtype, device=x.device)
    return torch.stack([steps, steps.flip(0) * 0.7], -1).view(1, 4, 6, 2).expand(2, -1, -1, -1)
