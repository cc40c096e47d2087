"""What the ranks' tensors hold, how results differ, and which errors are refusals."""

from __future__ import annotations

from typing import Final

import torch

__all__ = ["alike", "difference", "says_unsupported", "values"]

#: Words by which a device says that it does not have a collective, or does not take a layout.
_REFUSED: Final = ("not support", "not implement", "unsupport", "contiguous", "dense")
#: So that sums are exact, also of some; -high to high.
_HIGH: Final = {
    torch.int64: 1 << 61,
    torch.int32: 1 << 29,
    torch.float32: 1 << 22,
    torch.float64: 1 << 50,
    torch.int8: 60,
}


def says_unsupported(error: Exception) -> bool:
    """Whether a device says that it does not have the collective, which all ranks are told."""
    if isinstance(error, NotImplementedError):
        return True
    return any(word in str(error).lower() for word in _REFUSED)


def values(
    dtype: torch.dtype,
    count: int,
    summed: bool,
    seed: int,
    high: int | None = None,
    unusual: tuple[float, ...] = (),
) -> torch.Tensor:
    """Values whose sums are exact; where they are only carried, random bits.

    Args:
        dtype: of them.
        count: how many.
        summed: whether they are combined.
        seed: of the choice.
        high: they are below it, where sums are not all that is made of them.
        unusual: such as infinities, each of which stands for some of them.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    if not summed:
        bits = torch.randint(
            0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8
        )
        return bits.view(dtype)
    high = high or _HIGH.get(dtype, 100)
    low = 0 if dtype is torch.uint8 else -high

    def whole() -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    if dtype.is_complex:
        return torch.complex(whole().float(), whole().float()).to(dtype)
    found = whole().to(dtype)
    for value in unusual if dtype.is_floating_point else ():
        found[torch.rand(count, generator=generator) < 0.1] = value
    return found


def difference(found: torch.Tensor, wanted: torch.Tensor) -> str:
    """How one differs from the other, in words."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {tuple(found.shape)} for {wanted.dtype} {tuple(wanted.shape)}"
    plain = torch.contiguous_format  # not `contiguous`, which leaves one element its odd stride
    flat = [t.reshape(-1).clone(memory_format=plain) for t in (found, wanted)]
    bits = [t.view(torch.uint8).view(t.numel(), -1) for t in flat]
    places = (bits[0] != bits[1]).any(1).nonzero().flatten().tolist()
    first = places[0]
    one, other = (t.reshape(-1)[first].item() for t in (found, wanted))
    return f"{len(places)} wrong of {wanted.numel()}; at {first} {one} for {other}"


def alike(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """What was found, with the wanted bits where both are not a number."""
    if not wanted.dtype.is_floating_point or found.shape != wanted.shape:
        return found
    neither = found.isnan() & wanted.isnan()
    return torch.where(neither, wanted, found) if bool(neither.any()) else found
