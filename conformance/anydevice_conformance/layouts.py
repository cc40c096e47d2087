"""How tensors lie in memory: views of a flat one, by name."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, Final

import torch

__all__ = ["LAYOUTS", "is_dense", "overlaps"]

Build = Callable[[tuple[int, ...]], "tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None"]


def _contiguous(shape: tuple[int, ...]) -> Any:
    return math.prod(shape), lambda flat: flat.view(shape)


def _transposed(shape: tuple[int, ...]) -> Any:
    if len(shape) < 2:
        return None
    order = tuple(reversed(range(len(shape))))
    return math.prod(shape), lambda flat: flat.view(shape[::-1]).permute(order)


def _permuted(shape: tuple[int, ...]) -> Any:
    if len(shape) < 3:
        return None
    back = (len(shape) - 1, *range(len(shape) - 1))
    return math.prod(shape), lambda flat: flat.view(*shape[1:], shape[0]).permute(back)


def _channels_last(shape: tuple[int, ...]) -> Any:
    if len(shape) not in (4, 5):
        return None
    back = (0, len(shape) - 1, *range(1, len(shape) - 1))
    return math.prod(shape), lambda flat: flat.view(shape[0], *shape[2:], shape[1]).permute(back)


def _stepped(shape: tuple[int, ...]) -> Any:
    return 2 * math.prod(shape), lambda flat: flat.view(*shape, 2)[..., 0]


def _narrowed(shape: tuple[int, ...]) -> Any:
    if not shape:
        return None
    wide = (*shape[:-1], shape[-1] + 3)
    return math.prod(wide), lambda flat: flat.view(wide)[..., 1 : 1 + shape[-1]]


def _expanded(shape: tuple[int, ...]) -> Any:
    if not shape or not shape[-1]:
        return None
    return math.prod(shape[:-1]), lambda flat: flat.view(*shape[:-1], 1).expand(shape)


def _overlapping(shape: tuple[int, ...]) -> Any:
    if len(shape) != 2 or 0 in shape or shape[1] < 2:
        return None
    rows, columns = shape
    step = max(1, columns // 2)
    return (rows - 1) * step + columns, lambda flat: flat.unfold(0, columns, step)


def _repeated(shape: tuple[int, ...]) -> Any:
    """Expanded over the first dimension."""
    if not shape or not shape[0]:
        return None
    return math.prod(shape[1:]), lambda flat: flat.view(1, *shape[1:]).expand(shape)


def _mixed(turn: int) -> Build:
    """Any order of dimensions, up to two of which are stepped, padded or expanded."""

    def build(shape: tuple[int, ...]) -> Any:
        if not shape:
            return None
        dice = random.Random(f"{turn} {shape}")
        order = dice.sample(range(len(shape)), len(shape))
        odd = {d: dice.choice(("stepped", "padded", "expanded")) for d in order[:2]}
        dice.shuffle(order)
        strides, step = [0] * len(shape), 1
        for place in order:
            if odd.get(place) == "expanded":
                continue
            strides[place] = step * (1 + (odd.get(place) == "stepped"))
            step = strides[place] * max(1, shape[place]) + (odd.get(place) == "padded")
        last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        count = last + 1 if math.prod(shape) else 0
        return count, lambda flat: flat.as_strided(shape, strides, flat.storage_offset())

    return build


#: Name to a function of the shape, which gives how many elements the storage has, and the view of
#: a flat tensor of so many; None where the layout has no such shape.
LAYOUTS: Final[dict[str, Build]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "permuted": _permuted,
    "channels-last": _channels_last,
    "stepped": _stepped,
    "narrowed": _narrowed,
    "expanded": _expanded,
    "repeated": _repeated,
    "overlapping": _overlapping,
    "mixed": _mixed(0),
    "mixed otherwise": _mixed(1),
}


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory once, in whatever order of dimensions."""
    pairs = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of it are one place in memory, as far as its strides show."""
    if not tensor.numel():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
