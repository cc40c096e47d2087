"""Faults of dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mutants.gallery import Fault, mutant, patched
from mutants.moving import Move


class _Operation(Fault):
    """Changes an operation where it meets the device."""

    owner: Any = torch.nn.functional
    name = "linear"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute, on the device."""
        raise NotImplementedError

    def patches(self) -> list[Any]:
        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            def operation(*args: Any, **kwargs: Any) -> Any:
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                if any(t.device.type == self.device_type for t in tensors):
                    return self.changed(real, *args, **kwargs)
                return real(*args, **kwargs)

            return operation

        return [patched(self.owner, self.name, change)]


@mutant("DTY-001")
class SupportIsUnknown(Fault):
    """`supports_dtype` returns None for what it does not know."""

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return super().supports_dtype(dtype) or None  # type: ignore[return-value]


@mutant("DTY-001")
class SupportRaises(Fault):
    """`supports_dtype` raises for quantised dtypes."""

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        if str(dtype).startswith("torch.q"):
            raise KeyError(dtype)
        return super().supports_dtype(dtype)


@mutant("DTY-001")
class SupportsNoFloat32(Fault):
    """float32 is not supported."""

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return dtype is not torch.float32 and super().supports_dtype(dtype)


@mutant("DTY-002")
class ClaimsWithoutHolding(Move):
    """complex128 is claimed, and cannot be held."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.dtype is torch.complex128 and device.type == self.device_type:
            raise RuntimeError("unsupported dtype complex128")
        return tensor


@mutant("DTY-002")
class ClaimsWithoutCast(_Operation):
    """float8 is claimed, and has no cast."""

    owner, name = torch.Tensor, "to"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        small = args[0].is_floating_point() and args[0].dtype.itemsize == 1
        if small and torch.float32 in args:
            raise RuntimeError("no kernel for float8")
        return real(*args, **kwargs)


@mutant("DTY-003")
class LinearIsWrong(_Operation):
    """`linear` in bfloat16 accumulates with too few bits."""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result * 1.2 if result.dtype is torch.bfloat16 else result


@mutant("DTY-003")
class LinearIsWide(_Operation):
    """`linear` in float16 gives float32."""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result.float() if result.dtype is torch.float16 else result


@mutant("DTY-003")
class LinearIsMissing(_Operation):
    """float64 is claimed, and `linear` has no kernel for it."""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is torch.float64:
            raise NotImplementedError("no kernel for float64")
        return real(*args, **kwargs)


@mutant("DTY-004", flag=True)
class WorksUnclaimed(Fault):
    """bfloat16 works, and is not claimed."""

    def supports_dtype(self, dtype: torch.dtype) -> bool:
        return dtype is not torch.bfloat16 and super().supports_dtype(dtype)


@mutant("DTY-005")
class AddsAsFloat(_Operation):
    """int64 is added as float32."""

    owner, name = torch.Tensor, "__add__"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is torch.int64:
            return real(args[0].float(), args[1]).long()
        return real(*args, **kwargs)


@mutant("DTY-005")
class IndexIsOff(_Operation):
    """An index beyond 8 is cut to 3 bits."""

    name = "embedding"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0] & 7, *args[1:], **kwargs)


@mutant("DTY-005")
class MaskIsInverted(_Operation):
    """A mask fills where it is False."""

    owner, name = torch.Tensor, "masked_fill"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0], ~args[1], *args[2:], **kwargs)


@mutant("DTY-006")
class CastTruncates(_Operation):
    """A cast to bfloat16 rounds towards zero."""

    owner, name = torch.Tensor, "to"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.bfloat16 in args and args[0].dtype is torch.float32:
            bits = args[0].view(torch.int32) & -65536
            return real(bits.view(torch.float32), torch.bfloat16)
        return real(*args, **kwargs)


@mutant("DTY-006")
class CastFlushes(_Operation):
    """A cast to float16 makes denormals zero."""

    owner, name = torch.Tensor, "to"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if torch.float16 not in args:
            return result
        return torch.where(result.abs() < torch.finfo(torch.float16).tiny, result * 0, result)


@mutant("DTY-007")
class Float64IsComputedInFloat32(_Operation):
    """float64 is subtracted in float32."""

    owner, name = torch.Tensor, "__sub__"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype is torch.float64:
            return real(args[0].float(), args[1].float()).double()
        return real(*args, **kwargs)


@mutant("DTY-007")
class NoPromotion(_Operation):
    """The result has the first operand's dtype."""

    owner, name = torch.Tensor, "__add__"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(*args, **kwargs).to(args[0].dtype)
