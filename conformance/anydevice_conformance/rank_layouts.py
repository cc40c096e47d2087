"""How the tensors of collectives lie in memory, and what lies next to them."""

from __future__ import annotations

import dataclasses
from typing import Final

import torch

__all__ = ["DENSE", "LAYOUTS", "Room", "room"]

#: Elements before and behind a tensor.
_MARGIN: Final = 5
#: Layouts without gaps that are not contiguous.
DENSE: Final = ("transposed", "channels last")
LAYOUTS: Final = (*DENSE, "every second element")


@dataclasses.dataclass(frozen=True, eq=False)
class Room:
    """A tensor, and the memory next to it.

    Attributes:
        tensor: of zeros at first.
        around: zeros that nothing may write to.
    """

    tensor: torch.Tensor
    around: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        """Elements of its storage."""
        return sum(one.numel() for one in (self.tensor, *self.around))


def room(like: torch.Tensor, layout: str, offset: int = 0) -> Room:
    """Room for a tensor of the same shape and dtype, on the same device.

    Args:
        like: that tensor.
        layout: "plain", or one of `LAYOUTS`.
        offset: elements before it in its storage, besides the usual ones.
    """
    shape, start = like.shape, _MARGIN + offset
    step = 2 if layout == "every second element" and like.dim() else 1
    count = like.numel() * step
    storage = torch.zeros(start + count + _MARGIN, dtype=like.dtype, device=like.device)
    around = [storage[:start], storage[start + count :]]
    part = storage[start : start + count]
    if step == 2:
        pairs = part.view(*shape, 2)
        return Room(pairs[..., 0], (*around, pairs[..., 1]))
    order = _order(layout, like.dim())
    if order == sorted(order):
        return Room(part.view(shape), tuple(around))
    inverse = [order.index(dim) for dim in range(like.dim())]
    return Room(part.view([shape[dim] for dim in order]).permute(inverse), tuple(around))


def _order(layout: str, dims: int) -> list[int]:
    """The dimensions as they lie in memory."""
    order = list(range(dims))
    if layout == "transposed" and dims > 1:
        order[0], order[-1] = order[-1], order[0]
    if layout == "channels last" and dims > 2:
        order.append(order.pop(1))
    return order
