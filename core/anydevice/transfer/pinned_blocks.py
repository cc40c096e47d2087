"""Blocks of page-locked memory, each shared by several tensors that have storages of their own."""

from __future__ import annotations

import bisect
import ctypes
import threading
import weakref
from typing import Final

import torch

__all__ = ["block_of", "place_in_block"]

#: Addresses at which blocks begin, ascending, and the blocks; replaced as a whole.
_known: tuple[list[int], list[weakref.ref[torch.Tensor]]] = ([], [])
_writing: Final = threading.RLock()


def place_in_block(block: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor over a part of a block, with a storage of its own that keeps the block alive.

    The part begins at the byte ``offset``; ``like`` has the dtype, shape and strides.
    """
    _remember(block)
    memory = (ctypes.c_uint8 * like.nbytes).from_address(block.data_ptr() + offset)
    memory.block = block  # type: ignore[attr-defined]
    flat = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
    return flat.as_strided(like.shape, like.stride())


def block_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The block in which a tensor's first byte lies, if any.

    Copies must read the block itself: torch keeps the memory of a copy's source until the copy is
    over, but only that of tensors that its own allocator made.
    """
    address = tensor.data_ptr()
    starts, blocks = _known
    index = bisect.bisect_right(starts, address) - 1
    block = blocks[index]() if index >= 0 else None
    if block is None or address >= block.data_ptr() + block.numel():
        return None
    return block


def _remember(block: torch.Tensor) -> None:
    global _known
    if block_of(block) is block:
        return
    with _writing:
        pairs = [(s, b) for s, b in zip(*_known, strict=True) if b() is not None]
        pairs.append((block.data_ptr(), weakref.ref(block)))
        pairs.sort(key=lambda pair: pair[0])
        _known = [s for s, _ in pairs], [b for _, b in pairs]
