"""Operations on images and sequences of samples: convolutions, pools, and changes of size."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.operation import I, N, Operation, P

__all__ = ["IMAGES"]


def _image(dice: Dice) -> list[torch.Tensor]:
    channels, filters = dice.among(1, 3), dice.among(2, 5)
    return [dice.floats(2, channels, 9, 11), dice.floats(filters, channels, 3, 3)]


def _grouped(dice: Dice) -> list[torch.Tensor]:
    """Each group of channels has filters of its own; with one channel a group it is depthwise."""
    groups, each = dice.among(2, 3), dice.among(1, 2)
    return [dice.floats(2, groups * each, 9, 11), dice.floats(groups * 2, each, 3, 3)]


def _by_group(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, w, padding=1, groups=x.shape[1] // w.shape[1])


def _widening(dice: Dice) -> list[torch.Tensor]:
    channels = dice.among(1, 3)
    return [dice.floats(2, channels, 5, 6), dice.floats(channels, dice.among(2, 4), 3, 3)]


def _samples(dice: Dice) -> list[torch.Tensor]:
    channels, filters = dice.among(1, 3), dice.among(2, 5)
    length, width = dice.among(40, 65), dice.among(3, 10)
    return [dice.floats(2, channels, length), dice.floats(filters, channels, width)]


def _pictures(dice: Dice) -> list[torch.Tensor]:
    """Two of them: below zero, where a padding of zeros would be seen, as often as above."""
    return [dice.floats(2, dice.among(1, 4), dice.among(6, 9), dice.among(8, 11))]


def _channels(dice: Dice) -> list[torch.Tensor]:
    channels = dice.among(6, 9)
    return [
        dice.floats(2, channels, 5, dice.among(1, 7), scale=3.0) + dice.among(0.0, 20.0),
        dice.floats(channels),
        dice.floats(channels),
    ]


#: Name to operation.
IMAGES: Final[dict[str, Operation]] = {
    "conv2d": Operation(P, lambda x, w: F.conv2d(x, w, padding=1), _image, loose=2),
    "conv2d by steps": Operation(P, lambda x, w: F.conv2d(x, w, stride=2), _image, loose=2),
    "grouped conv2d": Operation(P, _by_group, _grouped, loose=2, needed=False),
    "dilated conv2d": Operation(
        P, lambda x, w: F.conv2d(x, w, dilation=2, padding=2), _image, loose=2, needed=False
    ),
    "transposed conv2d": Operation(
        P, lambda x, w: F.conv_transpose2d(x, w, stride=2), _widening, loose=2, needed=False
    ),
    "conv1d": Operation(
        P, lambda x, w: F.conv1d(x, w, stride=2, padding=1), _samples, loose=2, needed=False
    ),
    "group_norm": Operation(
        N, lambda x, w, b: F.group_norm(x, 3, w, b), _channels, loose=10, needed=False
    ),
    "batch_norm": Operation(
        N,
        lambda x, w, b: F.batch_norm(x, b.detach(), w.detach().abs() + 0.1, w, b),
        _channels,
        loose=10,
        needed=False,
    ),
    "largest of windows": Operation(
        I, lambda x: F.max_pool2d(x - 3, 3, 2, padding=1), _pictures, exact=True, needed=False
    ),
    "mean of windows": Operation(
        N, lambda x: F.avg_pool2d(x, 3, 2, padding=1), _pictures, loose=2, needed=False
    ),
    "mean of the whole": Operation(
        N, lambda x: F.adaptive_avg_pool2d(x, (1, 1)), _pictures, loose=4, needed=False
    ),
    "enlarged by repeating": Operation(
        I, lambda x: F.interpolate(x, scale_factor=2), _pictures, exact=True, needed=False
    ),
    "enlarged by lines": Operation(
        N,
        lambda x: F.interpolate(x, size=(13, 17), mode="bilinear", align_corners=False),
        _pictures,
        loose=2,
        needed=False,
    ),
    "enlarged to the corners": Operation(
        N,
        lambda x: F.interpolate(x, size=(13, 17), mode="bilinear", align_corners=True),
        _pictures,
        loose=2,
        needed=False,
    ),
    "padded and cut": Operation(
        I, lambda x: F.pad(x, (2, -1, -2, 3), value=1.5), _pictures, exact=True, needed=False
    ),
    "padded by mirrors": Operation(
        I, lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"), _pictures, exact=True, needed=False
    ),
}
