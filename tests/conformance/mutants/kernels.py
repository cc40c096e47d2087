"""Faults of the device's kernels: in place whichever function of torch leads to them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from mutants.gallery import Fault, mutant

_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class Kernel(Fault):
    """Puts other kernels in the places of some."""

    operations: ClassVar[tuple[str, ...]] = ()

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Compute, on the device."""
        raise NotImplementedError

    def patches(self) -> list[Any]:
        return [self._registered()]

    @contextlib.contextmanager
    def _registered(self) -> Iterator[None]:
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a kernel is overridden is the purpose
            for name in self.operations:
                library.impl(name, self._kernel(name), "PrivateUse1")
        try:
            yield
        finally:
            library._destroy()

    def _kernel(self, name: str) -> Callable[..., Any]:
        kept = torch.library.get_kernel(f"aten::{name}", "PrivateUse1")

        def real(*args: Any, **kwargs: Any) -> Any:
            return kept.call_boxed(_KEYS, *args, **kwargs)

        return lambda *args, **kwargs: self.changed(real, *args, **kwargs)


@mutant("DTY-018")
class GradientOfTheLast(Kernel):
    """Of rows that are looked up several times only the last lookup gives a gradient."""

    operations = ("embedding_dense_backward",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gradient, indices, rows = args[:3]
        found = torch.zeros(rows, gradient.shape[-1], dtype=gradient.dtype, device=gradient.device)
        found[indices.flatten()] = gradient.reshape(-1, gradient.shape[-1])
        return found


@mutant("DTY-009")
class GroupsAreShifted(Kernel):
    """A grouped convolution gives its channels in another order."""

    operations = ("convolution_overrideable",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found.roll(1, 1) if args[8] > 1 else found


@mutant("DTY-011")
class SigmoidIsStraight(Kernel):
    """The sigmoid of float16 is a piece of a straight line."""

    operations = ("sigmoid",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values = args[0]
        return (0.5 + values / 4).clamp(0, 1) if values.dtype is torch.float16 else real(values)


@mutant("DTY-012")
class LastBlockIsLost(Kernel):
    """A sum of more than 2^16 elements leaves out the last block of them."""

    operations = ("sum", "sum.dim_IntList")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, *rest = args
        if values.dim() == 1 and values.numel() > 1 << 16:
            values = values[: values.numel() >> 16 << 16]
        return real(values, *rest, **kwargs)


@mutant("DTY-013")
class IndicesAreBytes(Kernel):
    """The place of the largest element has 8 bits."""

    operations = ("max.dim",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        values, indices = real(*args, **kwargs)
        return values, indices.clamp(max=255)


@mutant("DTY-013")
class RepeatedIndicesAreLost(Kernel):
    """What is added by indices that come again is added once."""

    operations = ("_index_put_impl_", "index_put_")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensor, indices, values, *rest = args
        if rest and rest[0]:
            values = values + torch.ops.aten.index.Tensor(tensor, indices)
        return real(tensor, indices, values, False, *rest[1:])


@mutant("RNG-006")
class MeanIsIgnored(Kernel):
    """`normal_` has the mean 0, whatever is asked for."""

    operations = ("normal_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        deviation = args[2] if len(args) > 2 else 1.0
        return real(args[0], 0.0, deviation, **kwargs)


class _OwnGenerator(Kernel):
    def own(self, tensor: torch.Tensor) -> bool:
        """Whether this draw is from another generator."""
        raise NotImplementedError

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.own(args[0]):
            generator = torch.Generator(device=args[0].device)
            generator.seed()
            kwargs = {**kwargs, "generator": generator}
        return real(*args, **kwargs)


@mutant("RNG-007")
class LargeDrawsAreTheirOwn(_OwnGenerator):
    """A large tensor is filled from a generator of its own."""

    operations = ("uniform_",)

    def own(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() > 10_000


@mutant("RNG-007")
class SideStreamsDrawAlone(_OwnGenerator):
    """On a side stream numbers come from a generator of its own."""

    operations = ("uniform_", "normal_")

    def own(self, tensor: torch.Tensor) -> bool:
        index = tensor.device.index or 0
        return bool(self.module.current_stream(index) != self.module.default_stream(index))
