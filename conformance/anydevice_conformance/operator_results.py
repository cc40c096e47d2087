"""Compares what an operator gave on the device with what it gave on the host."""

from __future__ import annotations

import math
from typing import Any, Final

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.operator_calls import leaves
from anydevice_conformance.operator_digits import EACH, OF_LARGEST, allowed_of

__all__ = ["are_equal", "assert_alike"]

_PARTS: Final = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
#: Which dtypes the host compares; it has no equality of complex halves and 8-bit floats.
_COMPARED: Final = frozenset({*OF_LARGEST, torch.int64, torch.int32, torch.bool}) - {
    torch.complex32
}
#: And so many times the rounding of the host's own result.
_OF_THE_HOSTS: Final = 8.0


def are_equal(found: Any, plain: Any, digits: str = "") -> bool:
    """Whether two results, which may be tensors in lists, are the same bit for bit.

    Zeros of either sign are the same where `digits` says nothing of each element.
    """
    founds, plains = list(leaves(found)), list(leaves(plain))
    if len(founds) != len(plains):
        return False
    return all(_is_same(one, other, digits) for one, other in zip(founds, plains, strict=True))


def _is_same(one: Any, other: Any, digits: str) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.dtype is other.dtype and one.dtype in _COMPARED:  # much faster, and enough
            signs = digits in ("moved", "rounded")
            same = torch.equal(one, other) and (not signs or _same_signs(one, other))
            return same or same_bits(one, other)
        return same_bits(one, other)
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    return bool(one == other or (one != one and other != other))


def _same_signs(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not one.is_floating_point() or torch.equal(one.signbit(), other.signbit())


def assert_alike(name: str, way: str, found: Any, plain: Any, wide: Any, digits: str = "") -> None:
    """Compare results, which may be tensors in lists, or numbers.

    Args:
        name: of the operator.
        way: in which it was called; of gradients the roundings add up.
        found: the device's, on the host.
        plain: the host's.
        wide: the host's with twice the digits; None for none.
        digits: how exact each element is, of `Usual`; "" for in proportion to the largest.

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
            if digits:
                _assert_each(words, one, other, exact, digits)
                continue
            allowed = allowed_of(name, other.dtype)
            _assert_tensor(words, one, other, exact, allowed, 4.0 if way == "gradient" else 1.0)
        elif isinstance(other, float):
            near = math.isclose(one, other, rel_tol=1e-2, abs_tol=1e-5)
            assert near or (one != one and other != other), f"{words} gave {one}, not {other}"
        else:
            assert _is_same(one, other, ""), f"{words} gave {one}, not {other}"


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


def _assert_each(
    name: str, found: torch.Tensor, plain: torch.Tensor, wide: Any, digits: str
) -> None:
    """Each element by itself: the host's, or as near as one rounding is; zeros with their signs."""
    assert found.dtype is plain.dtype, f"{name} gave {found.dtype}, not {plain.dtype}"
    assert found.shape == plain.shape, f"{name} gave {tuple(found.shape)}, not {tuple(plain.shape)}"
    found, plain = (t.detach().resolve_conj().resolve_neg() for t in (found, plain))
    of = _plain_dtype(plain.dtype)
    if not of.is_floating_point:
        assert torch.equal(found, plain), f"{name}: {_difference(found, plain)}"
        return
    if not isinstance(wide, torch.Tensor) or wide.shape != plain.shape:
        wide = plain
    got, near, exact = (_parts(t) for t in (found, plain, wide.detach().to(_wider(plain.dtype))))
    same = (got == near) | (got.isnan() & near.isnan())
    zero = (near == 0) & (exact == 0)
    wrong = ~same
    if digits != "values":
        wrong |= zero & (got.signbit() != near.signbit())
    if digits == "rounded":
        limit = EACH[of] * exact.abs() + _OF_THE_HOSTS * (near - exact).abs()
        # What is too small for a normal number may be zero; what is nearly infinite, infinite.
        small = exact.abs() < 2 * torch.finfo(of).tiny
        limit = torch.where(small, torch.full_like(limit, 2 * torch.finfo(of).tiny), limit)
        close = near.isfinite() & exact.isfinite() & ((got - exact).abs() <= limit)
        large = exact.abs() > torch.finfo(of).max * (1 - EACH[of])
        wrong &= ~(close & ~zero) & ~(large & ~near.isnan() & ~got.isnan())
    assert not wrong.any(), f"{name}: {_difference(got, near, wrong)}"


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
