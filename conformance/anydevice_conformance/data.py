"""Tensors to check with, and exact comparison."""

from __future__ import annotations

import math
from typing import Final

import torch

__all__ = [
    "DTYPES",
    "REAL_FLOATS",
    "all_bits",
    "same_bits",
    "sample",
    "short_name",
    "specials",
    "tolerance",
]

#: Every dtype that weights, activations, ids or masks have.
DTYPES: Final = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
#: Of these, the ones that a model computes in.
REAL_FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

_TOLERANCES: Final = {
    torch.float64: 1e-10,
    torch.float32: 2e-3,  # some devices multiply float32 with 10 bits of mantissa
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def short_name(dtype: torch.dtype) -> str:
    """Such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


def tolerance(dtype: torch.dtype) -> float:
    """Relative and absolute difference that rounding may make in a matrix product."""
    return _TOLERANCES[dtype]


def sample(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A host tensor of random values that use the whole width of ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        width = torch.iinfo(dtype)
        high = min(width.max, 2**62)
        return torch.randint(max(width.min, -high), high, shape, generator=generator, dtype=dtype)
    if dtype.is_complex:
        parts = torch.randn((*shape, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def all_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A host tensor of random bits; floating ones are finite and normal, but of every size."""
    if not (dtype.is_floating_point or dtype.is_complex):
        return sample(dtype, *shape, seed=seed)
    plain = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    parts = (*shape, 2) if dtype.is_complex else shape
    generator = torch.Generator().manual_seed(seed)
    count = math.prod(parts) * plain.itemsize
    bits = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    values = bits.view(plain).reshape(parts)
    wide = values.double()
    normal = wide.isfinite() & (wide.abs() >= torch.finfo(plain).tiny)
    values = torch.where(normal, wide, torch.ones_like(wide)).to(plain)
    return torch.view_as_complex(values) if dtype.is_complex else values


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Every kind of value of a floating dtype: zeros, infinities, denormals, NaN payloads."""
    bits = dtype.itemsize * 8
    exponent, mantissa = {
        torch.float64: (11, 52),
        torch.float32: (8, 23),
        torch.float16: (5, 10),
        torch.bfloat16: (8, 7),
        torch.float8_e4m3fn: (4, 3),
        torch.float8_e5m2: (5, 2),
    }[dtype]
    top = ((1 << exponent) - 1) << mantissa
    payloads = {1, 1 << (mantissa - 1), (1 << mantissa) - 1, (1 << (mantissa - 1)) | 1}
    patterns = [0, 1, (1 << mantissa) - 1, 1 << mantissa, top - 1, top]
    patterns += [top | payload for payload in sorted(payloads)]
    patterns += [pattern | (1 << (bits - 1)) for pattern in patterns]
    signed = [p - (1 << bits) if p >= 1 << (bits - 1) else p for p in patterns]
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return torch.tensor(signed, dtype=integer).view(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two host tensors have one dtype, one shape, and the same bits."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.numel() == 0:
        return True
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg()
    # Not `contiguous`, which leaves a single element its odd stride.
    return plain.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
