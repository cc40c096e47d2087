"""Faults of operators that no check names: torch's own samples find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from mutants.gallery import mutant
from mutants.kernels import Kernel


@mutant("DTY-019")
class FunctionsInEightBits(Kernel):
    """Functions that few models call are computed with the digits of an 8-bit float."""

    operations = (
        "acosh",
        "asinh",
        "atanh",
        "cosh",
        "digamma",
        "erfinv",
        "exp2",
        "i0",
        "lgamma",
        "log10",
        "sinc",
        "sinh",
    )

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found.to(torch.float8_e5m2).to(found.dtype)


@mutant("DTY-019")
class OutIsWrittenInRows(Kernel):
    """What is written into `out=` is written row by row, however that lies in memory."""

    operations = ("add.out", "sub.out", "mul.out", "div.out", "maximum.out", "minimum.out")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out") if "out" in kwargs else args[-1]
        values = real(*(a for a in args if a is not out), out=torch.empty_like(out), **kwargs)
        if out.is_contiguous() or out.numel() != out.untyped_storage().nbytes() // out.itemsize:
            return out.copy_(values)
        out.as_strided((out.numel(),), (1,), 0).copy_(values.reshape(-1))
        return out


@mutant("DTY-015")
class BytesAreSigned(Kernel):
    """A cast of bytes to another dtype takes the upper half of them for negative numbers."""

    operations = ("_copy_from",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        source, target, *rest = args
        if source.dtype is torch.uint8 and target.dtype is torch.int32:
            source = source.view(torch.int8)
        return real(source, target, *rest, **kwargs)


@mutant("DTY-019")
class BiasIsForgottenNowAndThen(Kernel):
    """Each fiftieth linear layer leaves out its bias."""

    operations = ("addmm",)
    calls = 0

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        BiasIsForgottenNowAndThen.calls += 1
        bias, *others = args
        if BiasIsForgottenNowAndThen.calls % 50 == 0:
            bias = torch.zeros_like(bias)
        return real(bias, *others, **kwargs)


@mutant("DTY-019", operators="flip")
class RefusesViews(Kernel):
    """`flip` and `roll` raise for what is not contiguous."""

    operations = ("flip", "roll")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args[0].is_contiguous():
            raise NotImplementedError("this operator does not support strides")
        return real(*args, **kwargs)


@mutant("DTY-019", operators="exp")
class RefusesLargeOnes(Kernel):
    """`sigmoid` and `exp` raise for more than 4096 elements."""

    operations = ("sigmoid", "exp")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].numel() > 4096:
            raise RuntimeError("invalid configuration argument")
        return real(*args, **kwargs)


@mutant("DTY-019", operators="group_norm")
class FrozenInputGivesSums(Kernel):
    """`group_norm`'s weight has a wrong gradient where the input needs none."""

    operations = ("native_group_norm_backward",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = list(real(*args, **kwargs))
        if not args[-1][0] and found[1] is not None:
            found[1] = found[1] * 2
        return tuple(found)


@mutant("DTY-019", operators="tanh")
class IncomingGradientIsDense(Kernel):
    """The backward of `tanh` takes the gradient that comes in as if it were dense."""

    operations = ("tanh_backward",)

    def changed(self, real: Callable[..., Any], gradient: torch.Tensor, *args: Any) -> Any:
        if gradient.numel() > 1 and 0 in gradient.stride():
            part = gradient.new_zeros(gradient.shape)
            part.view(-1)[:1] = gradient.flatten()[:1]
            gradient = part
        return real(gradient, *args)


@mutant("DTY-019")
class ResultIsTheArgument(Kernel):
    """`abs` gives the argument itself where nothing in it is negative."""

    operations = ("abs",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (values,) = args
        if values.numel() and not values.is_complex() and not (values < 0).any().item():
            return values.as_strided(values.shape, values.stride())
        return real(*args, **kwargs)


def _as_tensor(value: Any) -> Any:
    """As torch gives numbers to a kernel."""
    return torch.tensor(value) if isinstance(value, int | float) else value


@mutant("DTY-013")
class MaximumWithoutNan(Kernel):
    """`maximum` and `minimum` leave NaN out."""

    operations = ("maximum", "minimum")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        one, other = args
        if not (one.is_floating_point() and other.is_floating_point()):
            return real(one, other)
        return real(torch.where(one.isnan(), other, one), torch.where(other.isnan(), one, other))


@mutant("DTY-019", operators="gelu")
class GeluByTanh(Kernel):
    """`gelu` is computed by `tanh`, whether that is asked for or not."""

    operations = ("gelu",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0], approximate="tanh")


@mutant("DTY-019", operators="index_select")
class AnswersFromBefore(Kernel):
    """`index_select` finds its last result again by the table's address and version."""

    operations = ("index_select", "cumsum")
    kept: ClassVar[dict[Any, Any]] = {}

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = args[0]
        key = values.data_ptr(), values.dtype, tuple(values.shape), values.stride(), str(args[1:2])
        last = self.kept.get("key")
        if last != key:
            self.kept.update(key=key, found=real(*args, **kwargs))
        return self.kept["found"].clone()


@mutant("DTY-007")
class WholeNumbersDivideInFloat32(Kernel):
    """Integers are divided in float32, whatever the default dtype is."""

    operations = ("div.Tensor",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_as_tensor, args))
        found = real(*args, **kwargs)
        whole = not any(isinstance(a, torch.Tensor) and a.is_floating_point() for a in args)
        return found.float() if whole and found.is_floating_point() else found


@mutant("DTY-007")
class AutocastAddsIn16Bits(Kernel):
    """Under autocast a product of a small and a large dtype is of the small one."""

    operations = ("mul.Tensor",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(_as_tensor, args))
        found = real(*args, **kwargs)
        dtypes = {a.dtype for a in args if isinstance(a, torch.Tensor) and a.dim()}
        if torch.is_autocast_enabled(found.device.type) and len(dtypes) == 2:
            return found.to(min(dtypes, key=lambda dtype: dtype.itemsize))
        return found


@mutant("DTY-017")
class CountsInFloat32(Kernel):
    """Sums of more than 2^24 bools or bytes are kept in float32."""

    operations = ("sum", "sum.dim_IntList")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        small = args[0].dtype.itemsize == 1 and not args[0].is_floating_point()
        return found.float().to(found.dtype) if small and args[0].numel() > 1 << 24 else found


@mutant("DTY-019", operators="pad of long samples")
class LongReflectionHasNoTail(Kernel):
    """The gradient of a reflected pad is lost beyond the 65536th sample."""

    operations = ("reflection_pad1d_backward.grad_input",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        found[..., 1 << 16 :].zero_()
        return found


@mutant("DTY-019", operators="moments")
class CorrectionIsABool(Kernel):
    """A variance is corrected by one, or not at all, whatever number is asked for."""

    operations = ("std.correction", "var.correction")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        correction = kwargs.get("correction")
        return real(
            *args, **{**kwargs, "correction": None if correction is None else min(correction, 1)}
        )


@mutant("DTY-019", operators="without input")
class NothingIsMultipliedByNaN(Kernel):
    """With beta=0 what is added is multiplied by zero, so that NaN in it stays."""

    operations = ("addmm", "addmv", "baddbmm")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found + args[0] * 0 if kwargs.get("beta", 1) == 0 else found


@mutant("DTY-019", operators="masked_fill")
class FillsInMemoryOrderWithoutGradients(Kernel):
    """In inference mode a transposed tensor is masked in the order of its memory."""

    operations = ("masked_fill_.Scalar", "masked_fill_.Tensor")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, mask, *rest = args
        turned = values.dim() == 2 and values.mT.is_contiguous() and values.shape == mask.shape
        if torch.is_inference_mode_enabled() and turned and not values.is_contiguous():
            real(values.mT.reshape(-1).view(values.shape), mask, *rest, **kwargs)
            return values
        return real(*args, **kwargs)
