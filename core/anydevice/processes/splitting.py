"""Dividing data among processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from anydevice.errors import OptionError

__all__ = ["share_of", "split"]


def share_of(length: int, rank: int, size: int) -> range:
    """The positions of ``length`` items that belong to a rank: equal shares, larger ones first.

    Example:
        >>> [list(share_of(5, rank, 2)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    each, more = divmod(length, size)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def split(inputs: Any, rank: int, size: int, *, apply_padding: bool = False) -> Any:
    """A rank's share of a list, tuple, tensor, array, data set, or mapping of them.

    Args:
        inputs: all of the data, the same on each rank.
        rank: whose share.
        size: the number of ranks.
        apply_padding: repeat the last item until all shares are equally long.

    Raises:
        OptionError: values of a mapping differ in length, or the data cannot be divided.
    """
    if isinstance(inputs, Mapping):
        lengths = {key: _length(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise OptionError(
                f"the values of a mapping to be split must be equally long; lengths: {lengths}"
            )
        return {
            key: split(value, rank, size, apply_padding=apply_padding)
            for key, value in inputs.items()
        }
    length = _length(inputs)
    own = share_of(length, rank, size)
    positions = list(own)
    if apply_padding and length:
        positions += [length - 1] * (-(-length // size) - len(own))
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        return inputs.select(positions)  # a data set of `datasets`
    if len(positions) == len(own):
        return inputs[own.start : own.stop]
    if isinstance(inputs, (list, tuple)):
        own_items = [inputs[position] for position in positions]
        return tuple(own_items) if isinstance(inputs, tuple) else own_items
    return inputs[positions]


def _length(inputs: Any) -> int:
    if isinstance(inputs, torch.Tensor) and inputs.ndim == 0:
        raise OptionError("a tensor without dimensions cannot be split between processes")
    if isinstance(inputs, (set, frozenset)) or not hasattr(inputs, "__getitem__"):
        raise OptionError(
            f"{type(inputs).__name__} cannot be split between processes: use a list, tuple, "
            "tensor, or a mapping of them"
        )
    return len(inputs)
