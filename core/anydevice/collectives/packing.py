"""Many tensors as one piece of memory: one collective for all, in any dtype.

Bytes travel, so bool, bfloat16 and 8-bit floats need no support of a collective's library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

__all__ = ["by_device_type", "pack", "unpack"]

#: Bytes to which each tensor's place is rounded up, so that any dtype can be viewed there.
_ALIGNMENT: Final = 16


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of tensors of one device, one after another; a view where there is one tensor."""
    pieces = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    if len(pieces) == 1:
        return pieces[0]
    whole = torch.zeros(sum(map(_rounded, pieces)), dtype=torch.uint8, device=tensors[0].device)
    start = 0
    for piece in pieces:
        whole[start : start + piece.numel()] = piece
        start += _rounded(piece)
    return whole


def unpack(
    whole: torch.Tensor, like: Sequence[torch.Tensor], *, copy: bool = False
) -> list[torch.Tensor]:
    """Undo `pack`: views of ``whole`` with the dtypes and shapes of ``like``."""
    found, start = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        piece = whole[start : start + size]
        start += -(-size // _ALIGNMENT) * _ALIGNMENT
        view = piece.view(tensor.dtype).reshape(tensor.shape)
        found.append(view.clone() if copy else view)
    return found


def by_device_type(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors by the type of their device, in the same order on all ranks."""
    groups: dict[str, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(str(tensor.device), []).append(position)
    return list(groups.values())


def _rounded(piece: torch.Tensor) -> int:
    return -(-piece.numel() // _ALIGNMENT) * _ALIGNMENT
