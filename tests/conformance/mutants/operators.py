"""Faults of operators that no check names: torch's own samples find them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
