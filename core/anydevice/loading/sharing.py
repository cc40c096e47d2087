"""Weights of a torch file that share memory get separate memory.

`torch.save` keeps what was shared: tied weights are two names of one storage, and an expanded
tensor is one number seen many times. A model whose weights are not tied must not get them so, since
training one would change the other.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

import torch

from anydevice.checkpoint.mapped import backing_of, map_file
from anydevice.tensors import is_dense

__all__ = ["separate"]

Key = TypeVar("Key")


def separate(values: MutableMapping[Key, torch.Tensor]) -> list[Key]:
    """Replace host tensors that share memory, with each other or within themselves.

    The first of those that share stays. Another one is mapped again where it is a view of a file,
    and copied where it is not.

    Returns:
        The keys whose tensors are copies now.
    """
    spans = sorted((span, number) for number, v in enumerate(values.values()) if (span := _span(v)))
    keys = list(values)
    end = 0
    copied = []
    for (start, stop), number in spans:
        key = keys[number]
        value = values[key]
        if start < end or not is_dense(value):
            values[key] = _anew(value)
            if backing_of(values[key]) is None:
                copied.append(key)
        end = max(end, stop)
    return copied


def _span(value: torch.Tensor) -> tuple[int, int] | None:
    """The first and the last address of its elements; None for what holds none on the host."""
    if value.device.type != "cpu" or value.layout is not torch.strided or not value.numel():
        return None
    if hasattr(value, "__tensor_flatten__"):
        return None
    start = value.data_ptr()
    last = sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))
    return start, start + (last + 1) * value.dtype.itemsize


def _anew(value: torch.Tensor) -> torch.Tensor:
    place = backing_of(value)
    if place is None:
        return value.clone()
    return map_file(place.path, own=True).tensor(place.offset, value.dtype, value.shape)
