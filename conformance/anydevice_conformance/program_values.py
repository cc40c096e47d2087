"""What random programs compute with: values of several dtypes, operators, views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from anydevice_conformance.subject import Subject

__all__ = ["applied", "apply_in_place", "first_values", "part_of", "value_dtypes"]

#: Elements of a value: small, more than a block of threads, and what drivers copy in pieces.
_SIZES: Final = (300, 1, 70_000, 300, 4097, 300, 1, 300_001, 33, 300, 4097)
#: Half of the values are float32, which all operators take.
_DTYPES: Final = (
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bfloat16,
    torch.int32,
    torch.float64,
    torch.bool,
    torch.int8,
)

Function = Callable[[torch.Tensor], torch.Tensor]

#: Operators that give the same bits on every device, each with kernels of its own.
_OF_NUMBERS: Final[tuple[Function, ...]] = (
    lambda x: x + 1,
    lambda x: torch.where(x > 5, x, -x),
    lambda x: x.clamp(min=3),
    lambda x: x.abs().neg(),
    lambda x: torch.maximum(x, -x),
    lambda x: x - x.max(),
    lambda x: x.sort(descending=True).values,
    lambda x: x.double().add(1).float(),
    lambda x: x.masked_fill(x > 7, 2.0),
    lambda x: torch.full_like(x, 3.0) + x,
    lambda x: torch.zeros_like(x) + x,
    lambda x: x.lerp(x + 2, 0.5),
)
_OF_ALL: Final[tuple[Function, ...]] = (
    lambda x: x.clone(),
    lambda x: x.flip(0),
    lambda x: x.roll(1),
    lambda x: torch.cat([x[1:], x[:1]]),
    lambda x: x[torch.arange(len(x) - 1, -1, -1, device=x.device)],
    lambda x: x.gather(0, torch.arange(len(x), device=x.device)),
    lambda x: torch.stack([x, x])[1],
    lambda x: x[None].expand(2, -1).contiguous()[0],
    lambda x: x.index_select(0, torch.arange(len(x), device=x.device)),
    lambda x: torch.empty_like(x).copy_(x),
)


def value_dtypes(subject: Subject) -> list[torch.dtype]:
    """The dtypes that values take turns in."""
    return subject.supported(*_DTYPES)


def first_values(dtypes: list[torch.dtype], seed: int) -> torch.Tensor:
    """Values to begin with, which the seed chooses; what has no seed is small."""
    size = _SIZES[seed * 3 // 4 % len(_SIZES)]
    plain = torch.arange(float(size)) + seed
    if not dtypes or seed % 5 < 3:
        return plain
    return (plain % 100).to(dtypes[seed // 5 % len(dtypes)])


def applied(tensor: torch.Tensor, expected: torch.Tensor, number: int) -> tuple[torch.Tensor, ...]:
    """An operator's result on the device and on the host; another one where the device has none."""
    operators = (*_OF_NUMBERS, *_OF_ALL) if tensor.dtype is torch.float32 else _OF_ALL
    for operator in (operators[number % len(operators)], _OF_ALL[0]):
        try:
            return operator(tensor), operator(expected)
        except NotImplementedError:
            continue
    raise AssertionError(f"the device cannot clone {tensor.dtype}")


def apply_in_place(tensor: torch.Tensor, number: int) -> None:
    """Change a tensor where it lies."""
    if tensor.dtype is not torch.float32 or number % 3 == 2:
        tensor.copy_(tensor.flip(0))
    elif number % 3:
        tensor.mul_(2)
    else:
        tensor[::2].sub_(4)


def part_of(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """What is moved of a value: mostly all of it, or a view of it."""
    if number % 7 == 1 and len(tensor) > 1:
        return tensor[1:]
    if number % 7 == 3:
        return tensor[::2]
    if number % 7 == 5 and len(tensor) % 2 == 0:
        return tensor.view(-1, 2).t()
    return tensor
