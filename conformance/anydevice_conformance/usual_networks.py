"""Usual operators of networks in less usual forms: losses, recurrent layers, images."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.usual_operator import (
    CUBE,
    WIDE_FLOATS,
    different,
    numbers,
    of_shapes,
    usual,
)

__all__ = ["NETWORKS"]


def _labels(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Logits, classes of which some are ignored, and weights of the classes."""
    rows, classes = dice.among(3, 17, 300), dice.among(2, 9)
    places = dice.integers(0, classes, rows)
    places[::3] = -100
    return [
        numbers(dice, dtype, rows, classes, low=-3, high=3),
        places,
        numbers(dice, dtype, classes, low=0.1, high=2),
    ]


def _grid(dice: Dice, dtype: torch.dtype) -> list[Any]:
    picture = different(dice, torch.float32, 1, 2, 5, 7).to(dtype) / 8
    return [picture, numbers(dice, dtype, 1, 3, 4, 2, low=-1.1, high=1.1)]


def _gru(x: torch.Tensor, wi: torch.Tensor, wh: torch.Tensor, b: torch.Tensor) -> Any:
    start = torch.ones(1, x.shape[1], 33, dtype=x.dtype, device=x.device)
    return torch.gru(x, start, (wi, wh, b, b), True, 1, 0.0, False, False, False)


#: All of them.
NETWORKS: Final = (
    usual(
        "losses of classes",
        _labels,
        lambda x, t, w: (
            F.cross_entropy(x, t, w.detach()),
            F.cross_entropy(x, t, reduction="none"),
        ),
    ),
    usual(
        "other losses",
        of_shapes((3, 7), (3, 7)),
        lambda x, y: (
            F.huber_loss(x, y, delta=0.7),
            F.soft_margin_loss(x, y.detach().sign()),
            F.gaussian_nll_loss(x, y, y.abs() + 0.1),
            F.cosine_embedding_loss(x, y, x.new_ones(3)),
        ),
    ),
    usual("gru", of_shapes((3, 2, 5), (99, 5), (99, 33), (99,)), _gru, *WIDE_FLOATS),
    usual(
        "conv_transpose2d",
        of_shapes((2, 4, 5, 3), (4, 3, 3, 2)),
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1, 2),
    ),
    usual(
        "dilated conv2d",
        of_shapes((2, 3, 9, 8), (4, 3, 3, 2), (4,)),
        lambda x, w, b: F.conv2d(x, w, b, 1, (2, 1), 2),
    ),
    usual(
        "grid_sample", _grid, lambda x, g: F.grid_sample(x, g, align_corners=False), *WIDE_FLOATS
    ),
    usual(
        "trilinear resize",
        of_shapes((1, 2, 3, 4, 5)),
        lambda x: F.interpolate(x, (4, 5, 3), mode="trilinear"),
        *WIDE_FLOATS,
    ),
    usual("fold", of_shapes((1, 18, 35)), lambda x: F.fold(x, (7, 9), 3)),
    usual(
        "norms without weights",
        CUBE,
        lambda x: (F.layer_norm(x, x.shape[-1:]), F.rms_norm(x, x.shape[1:]), F.group_norm(x, 1)),
    ),
)
