"""What the ranks' tensors hold, how results differ, and which errors are refusals."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["difference", "is_refusal", "values"]

#: Words by which a device says that it does not have a collective, or does not take a layout.
_REFUSED: Final = ("not support", "not implement", "unsupport", "contiguous", "dense")


def is_refusal(error: Exception) -> bool:
    """Whether a device says that it does not have the collective, which all ranks are told."""
    if isinstance(error, NotImplementedError):
        return True
    return any(word in str(error).lower() for word in _REFUSED)


def values(dtype: torch.dtype, count: int, summed: bool, seed: int) -> torch.Tensor:
    """Values whose sums are exact; where they are only carried, random bits."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    if not summed:
        bits = torch.randint(
            0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8
        )
        return bits.view(dtype)
    high = {
        torch.int64: 1 << 61,
        torch.int32: 1 << 29,
        torch.float32: 1 << 22,
        torch.float64: 1 << 50,
    }.get(dtype, 100)
    return torch.randint(-high, high, (count,), generator=generator).to(dtype)


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """How one differs from the other, in words."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {tuple(found.shape)} for {wanted.dtype} {tuple(wanted.shape)}"
    bits = [t.contiguous().view(torch.uint8).view(t.numel(), -1) for t in (found, wanted)]
    places = (bits[0] != bits[1]).any(1).nonzero().flatten().tolist()
    first = places[0]
    one, other = (t.reshape(-1)[first].item() for t in (found, wanted))
    return f"{len(places)} wrong of {wanted.numel()}; at {first} {one} for {other}"
