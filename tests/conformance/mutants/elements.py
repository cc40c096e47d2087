"""Faults of kernels that numbers of another kind, another dtype or unusual values show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mutants.gallery import mutant
from mutants.kernels import Kernel

_CHECK = "test_DTY_019_usual_operators"


@mutant("DTY-019", check=_CHECK, operators="compared with numbers")
class BrokenNumbersAreCut(Kernel):
    """An integer tensor is compared with a broken number as if that were whole."""

    operations = ("gt.Scalar_out", "ge.Scalar_out", "lt.Scalar_out", "le.Scalar_out")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, number, *rest = args
        if isinstance(number, float) and abs(number) < 1e9 and not values.is_floating_point():
            number = int(number)
        return real(values, number, *rest, **kwargs)


@mutant("DTY-019", check=_CHECK, operators="sort")
class NegativeNanIsTheLeast(Kernel):
    """A sort puts NaN whose sign is set first."""

    operations = ("sort.values_stable",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = args[0]
        found = real(*args, **kwargs)
        if values.is_floating_point() and values.dim() == 2:
            lowest = torch.where(values.isnan() & values.signbit(), -torch.inf, values)
            real(lowest, *args[1:], **kwargs)
        return found


@mutant("DTY-019", check=_CHECK, operators="in another dtype")
class SumsAreWidenedTooLate(Kernel):
    """A sum with `dtype=` is rounded to the input's dtype before."""

    operations = ("sum.IntList_out",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if args[0].dtype.itemsize == 2 and args[0].is_floating_point():
            found.copy_(found.to(args[0].dtype))
        return found


@mutant("DTY-019", check=_CHECK, operators="rows of one value")
class EpsilonIsHalf(Kernel):
    """A norm's epsilon is kept in 16 bits, where it is zero."""

    operations = ("native_layer_norm",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, *others, epsilon = args
        if values.dtype is torch.float16 and epsilon < 1e-8:
            epsilon = 0.0
        return real(values, *others, epsilon, **kwargs)


@mutant("DTY-019", check=_CHECK)
class DoubleIsSingle(Kernel):
    """In float64 elements are added and multiplied with the digits of float32."""

    operations = ("add.out", "mul.out")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        if found.dtype is torch.float64:
            found.copy_(found.float())
        return found


@mutant("DTY-019", check=_CHECK)
class ZerosHaveNoSign(Kernel):
    """A product that is zero is never negative."""

    operations = ("mul.out",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found.masked_fill_(found == 0, 0) if found.is_floating_point() else found


@mutant("DTY-019", check=_CHECK)
class EqualsGiveTheLast(Kernel):
    """Of equal values the place of the last is given."""

    operations = ("argmax.out",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, *rest = args
        dim = rest[0] if rest else None
        if dim is None or not values.dim() or not values.numel():
            return real(*args, **kwargs)
        found = real(values.flip(dim), *rest, **kwargs)
        return found.copy_(values.shape[dim] - 1 - found)


@mutant("DTY-019", check=_CHECK)
class PlacesIn16Bits(Kernel):
    """Rows are picked by places that are kept in 16 bits."""

    operations = ("index_select",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, dim, places = args
        return real(values, dim, places % (1 << 15), **kwargs)


@mutant("DTY-019", check=_CHECK)
class NormOfTheFirst(Kernel):
    """The norm of a long tensor of 16 bits is that of its first 65,536 elements."""

    operations = ("linalg_vector_norm.out",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, *rest = args
        if values.dtype.itemsize == 2 and values.dim() == 1:
            values = values[: 1 << 16]
        return real(values, *rest, **kwargs)


@mutant("DTY-019", check=_CHECK)
class ShiftsFillWithZeros(Kernel):
    """A shift to the right of a negative byte fills with zeros."""

    operations = ("__rshift__.Scalar", "bitwise_right_shift.Tensor_out")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, by, *rest = args
        found = real(values, by, *rest, **kwargs)
        if values.dtype is torch.int8:
            plain = (values.int() & 255).cpu() >> (by.cpu().int() if torch.is_tensor(by) else by)
            found.copy_(plain.to(torch.int8).to(found.device))
        return found
