"""Faults of operations, of random numbers, and of what is left of the interface."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from anydevice.backend import MemoryInfo
from mutants.dtypes import _Operation
from mutants.gallery import Fault, mutant


@mutant("DEV-014")
class MisspeltMember(Fault):
    """An override has another name than the member's."""

    def memory_alocated(self, index: int) -> int:
        return 0


@mutant("DEV-015")
class StartsInTwoSteps(Fault):
    """The runtime is started by the first thread, and the second one does not wait for it."""

    starting = False
    started = False

    def device_name(self, index: int) -> str:
        if not self.started:
            if self.starting:
                raise RuntimeError("the runtime is not ready")
            self.starting = True
            time.sleep(0.2)
            self.started = True
        return super().device_name(index)


@mutant("MEM-015")
class KeepsAQuarterFree(Fault):
    """Free leaves out a quarter of the device, "for the driver"."""

    def memory_info(self, index: int) -> MemoryInfo:
        info = super().memory_info(index)
        return MemoryInfo(free=max(0, info.free - info.total // 4), total=info.total)


@mutant("RNG-007")
class DropoutDrawsFromTheHost(_Operation):
    """Dropout draws from the host's generator."""

    name = "dropout"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mask = torch.rand(args[0].shape) > 0.5
        return args[0] * mask.to(args[0].device) * 2


@mutant("DTY-008")
class InferenceIsApproximate(_Operation):
    """In inference mode products are of fewer digits."""

    owner, name = torch.Tensor, "__matmul__"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result * 1.01 if torch.is_inference_mode_enabled() else result


@mutant("DTY-009")
class OddProductsAreWrong(_Operation):
    """Products with an odd inner dimension above 16 miss the last one."""

    owner, name = torch, "matmul"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        inner = args[0].shape[-1]
        if inner > 16 and inner % 2:
            return real(args[0][..., :-1], args[1][..., :-1, :])
        return real(*args, **kwargs)


@mutant("DTY-010")
class MaskIsForgotten(_Operation):
    """Attention forgets its mask."""

    name = "scaled_dot_product_attention"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("attn_mask", None)
        return real(*args, **kwargs)


@mutant("DTY-010")
class MaskOfTheFirstSample(_Operation):
    """Attention takes the first sample's mask for all where the mask is one for all heads."""

    name = "scaled_dot_product_attention"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.pop("attn_mask", None)
        if mask is not None and mask.dim() == 4 and mask.shape[1] < args[0].shape[1]:
            mask = mask[:1]
        return real(*args, attn_mask=mask, **kwargs)


@mutant("DTY-011")
class LossReadsMemoryInOrder(_Operation):
    """A loss reads its two arguments as if they lay in memory in the same order."""

    name = "mse_loss"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        plain = torch.empty(args[0].shape, device="meta").stride()
        return real(*(tensor.as_strided(tensor.shape, plain) for tensor in args), **kwargs)


@mutant("DTY-011")
class SoftmaxOverflows(_Operation):
    """`softmax` does not subtract the maximum."""

    owner, name = torch, "softmax"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        x, dimension = args
        x = x.to(kwargs.get("dtype") or x.dtype)
        return x.exp() / x.exp().sum(dimension, keepdim=True)


@mutant("DTY-012")
class SumsIn32Bits(_Operation):
    """Integers are summed in 32 bits."""

    owner, name = torch.Tensor, "sum"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return result.int().long() if result.dtype is torch.int64 else result


@mutant("DTY-013")
class ArgmaxIsTheLast(_Operation):
    """`argmax` of rows counts from the end."""

    owner, name = torch.Tensor, "argmax"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        return args[0].shape[-1] - 1 - result if args[0].shape[-1] > 100 else result


@mutant("DTY-014")
class HalfIsSummedInHalf(_Operation):
    """A sum in 16 bits is kept in 16 bits."""

    owner, name = torch.Tensor, "sum"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].dtype.itemsize == 2 and len(args) > 1:
            return args[0].cumsum(-1)[..., -1].clamp(max=16) if args[1] == -1 else real(*args)
        return real(*args, **kwargs)


@mutant("DTY-015")
class IntegersRoundToNearest(_Operation):
    """A cast from floating to integer rounds, where torch cuts off."""

    owner, name = torch.Tensor, "to"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        wanted = args[1] if len(args) > 1 else None
        integer = wanted in (torch.int32, torch.int16, torch.int8)
        if integer and args[0].is_floating_point():
            return real(args[0].round(), *args[1:], **kwargs)
        return real(*args, **kwargs)


@mutant("DTY-016")
class ConjugateIsIgnored(_Operation):
    """The conjugate of a complex tensor is the tensor."""

    owner, name = torch.Tensor, "conj"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return args[0]


@mutant("DTY-017", big=True)
class ElementsIn24Bits(_Operation):
    """Elements beyond 2^24 are left out of a product in place."""

    owner, name = torch.Tensor, "mul_"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args[0].numel() > 1 << 24:
            real(args[0][: 1 << 24], *args[1:], **kwargs)
            return args[0]
        return real(*args, **kwargs)
