"""Compares what an operator gave on the device with what it gave on the host."""

from __future__ import annotations

import math
import re
from typing import Any, Final

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.operator_calls import leaves

__all__ = ["are_equal", "assert_alike"]

#: What rounding may make of a result, in proportion to the largest one beside it: a few units in
#: the last place. Of functions some devices have float32's digits in float64.
_ALLOWED: Final = {
    torch.float64: 5e-5,
    torch.complex128: 5e-5,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 8e-3,
    torch.complex32: 8e-3,
    torch.bfloat16: 5e-2,
}
#: Of products, which some devices compute with 10 bits of mantissa in float32.
_OF_PRODUCTS: Final = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 8e-3,
    torch.complex64: 8e-3,
    torch.float16: 2e-2,
    torch.complex32: 2e-2,
    torch.bfloat16: 1e-1,
}
_PRODUCTS: Final = re.compile(
    r"mm|mv|dot|addr|outer|inner|kron|linear|conv|attention|einsum|cdist|lstm|gru|rnn|linalg|cov$"
    r"|corrcoef|cholesky|solve|inverse|eigen|singular|chain|fft|stft|matrix|vander|pinv|renorm"
)
#: Products with functions among them.
_WITH: Final = re.compile("attention|fft|lstm|gru|rnn")
#: Of which some devices have few digits, in every dtype.
_FEW_DIGITS: Final = re.compile(r"a(sin|cos|tan)h?\d?$|arc|digamma|lgamma|erfinv|logit|tan$")
#: Where places between elements are computed, and hence weights.
_BETWEEN: Final = re.compile(
    "resize|interpolate|upsample|enlarged|grid|bicubic|quantile|range|space"
)
_PARTS: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
#: Which dtypes the host compares; it has no equality of complex halves and 8-bit floats.
_COMPARED: Final = frozenset({*_ALLOWED, torch.int64, torch.int32, torch.bool}) - {torch.complex32}
#: And so many times the rounding of the host's own result.
_OF_THE_HOSTS: Final = 8.0


def are_equal(found: Any, plain: Any) -> bool:
    """Whether two results, which may be tensors in lists, are the same bit for bit."""
    founds, plains = list(leaves(found)), list(leaves(plain))
    return len(founds) == len(plains) and all(map(_is_same, founds, plains))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype is other.dtype and one.dtype in _COMPARED:  # much faster, and enough
            return torch.equal(one, other) or same_bits(one, other)
        return same_bits(one, other)
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and one == other


def assert_alike(name: str, way: str, found: Any, plain: Any, wide: Any) -> None:
    """Compare results, which may be tensors in lists, or numbers.

    Args:
        name: of the operator.
        way: in which it was called; of gradients the roundings add up.
        found: the device's, on the host.
        plain: the host's.
        wide: the host's with twice the digits; None for none.

    Raises:
        AssertionError: they differ by more than rounding makes.
    """
    founds, plains = list(leaves(found)), list(leaves(plain))
    wides = list(leaves(wide)) if wide is not None else plains
    if len(wides) != len(plains):
        wides = plains
    words = name if way == "plain" else f"{name} ({way})"
    assert len(founds) == len(plains), f"{words} gave {len(founds)} results, not {len(plains)}"
    for one, other, exact in zip(founds, plains, wides, strict=True):
        same = type(one) is type(other) or isinstance(one, torch.Tensor) == isinstance(
            other, torch.Tensor
        )
        assert same, f"{words} gave {type(one).__name__}, not {type(other).__name__}"
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            allowed = _allowed(name, other.dtype)
            _assert_tensor(words, one, other, exact, allowed, 4.0 if way == "gradient" else 1.0)
        elif isinstance(other, float):
            near = math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-5)
            assert near or (one != one and other != other), f"{words} gave {one}, not {other}"
        else:
            assert one == other, f"{words} gave {one}, not {other}"


def _allowed(name: str, dtype: torch.dtype) -> float | None:
    allowed = _ALLOWED.get(dtype)
    if allowed is not None and (_BETWEEN.search(name) or _FEW_DIGITS.match(name)):
        return max(allowed, 1e-3)
    if not _PRODUCTS.search(name):
        return allowed
    functions = dtype in (torch.float64, torch.complex128) and _WITH.search(name)
    return allowed if functions else _OF_PRODUCTS.get(dtype)


def _assert_tensor(
    name: str,
    found: torch.Tensor,
    plain: torch.Tensor,
    wide: Any,
    allowed: float | None,
    loose: float,
) -> None:
    assert found.dtype is plain.dtype, f"{name} gave {found.dtype}, not {plain.dtype}"
    assert found.shape == plain.shape, f"{name} gave {tuple(found.shape)}, not {tuple(plain.shape)}"
    found, plain = (t.detach().resolve_conj().resolve_neg() for t in (found, plain))
    if allowed is None:
        assert torch.allclose(_bits(found), _bits(plain), 0, 0, equal_nan=True), (
            f"{name}: {_difference(found, plain)}"
        )
        return
    if not isinstance(wide, torch.Tensor) or wide.shape != plain.shape:
        wide = plain
    got, near, exact = (_parts(t) for t in (found, plain, wide.detach().to(_wider(plain.dtype))))
    rounded = exact.to(_plain_dtype(plain.dtype)).double()
    sure = (near.isnan() == rounded.isnan()) & (near.isinf() == rounded.isinf())
    wrong = sure & ((got.isnan() != near.isnan()) | (near.isinf() & (got != near)))
    assert not wrong.any(), f"{name}: {_difference(got, near, wrong)}"
    finite = sure & near.isfinite() & exact.isfinite()
    near, exact = (torch.where(finite, t, torch.zeros_like(t)) for t in (near, exact))
    error = torch.where(finite, (got - exact).abs(), torch.zeros_like(exact))
    error = error.nan_to_num(torch.inf, torch.inf)
    # Of what is zero by itself, as a softmax of one key has a gradient, only rounding is left.
    least = 0.05 if loose > 1 else 1e-6
    most = max(float(near.abs().max()), least) if near.numel() else 0.0
    limit = allowed * loose * most + _OF_THE_HOSTS * (near - exact).abs()
    wrong = error > limit
    assert not wrong.any(), f"{name}: {_difference(got, exact, wrong)}, of up to {most:.4g}"


def _wider(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def _plain_dtype(dtype: torch.dtype) -> torch.dtype:
    """That of a number's parts."""
    return _PARTS.get(dtype, dtype)


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    """Numbers in float64; of complex ones both parts."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj().contiguous()).double()
    return tensor.double()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """What equality is seen by: 8-bit floats have none of their own."""
    return tensor.float() if tensor.is_floating_point() else tensor


def _difference(
    found: torch.Tensor, wanted: torch.Tensor, wrong: torch.Tensor | None = None
) -> str:
    if wrong is None:
        wrong = _bits(found) != _bits(wanted)
    places = wrong.nonzero()
    if not len(places):
        return "NaN in other places"
    first = tuple(places[0].tolist())
    at = f" at {list(first)}" if first else ""
    return (
        f"{len(places)} wrong of {wanted.numel()};{at} {found[first].item():.6g} "
        f"for {wanted[first].item():.6g}"
    )
