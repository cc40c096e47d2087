"""Faults of autocast and of loss scalers that a first step does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mutants.collectives import _Collective
from mutants.dtypes import _Operation
from mutants.gallery import Fault, mutant, patched
from mutants.kernels import Kernel


@mutant("TRN-001")
class AutocastOfMatrices(_Operation):
    """Autocast leaves a linear layer of three dimensions in float32."""

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        wide = args[0].dim() == 3 and torch.is_autocast_enabled(self.device_type)
        return found.float() if wide else found


class _LooksAtOne(torch.amp.GradScaler):
    """Whether a step is taken depends on the first parameter's gradient."""

    def _unscale_grads_(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        found = super()._unscale_grads_(optimizer, *args, **kwargs)
        first = optimizer.param_groups[0]["params"][0].grad
        if first is not None and not first.isfinite().all():
            return found
        return {device: value * 0 for device, value in found.items()}


@mutant("TRN-002")
class OneGradientCounts(Fault):
    """Only the first parameter's gradient is looked at."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        return _LooksAtOne(self.device_type, **kwargs)


@mutant("TRN-003")
class NeverGrows(Fault):
    """The scale never grows."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        return torch.amp.GradScaler(self.device_type, **{**kwargs, "growth_factor": 1.0000001})


@mutant("TRN-003")
class IgnoresEnabled(Fault):
    """A scaler that is switched off scales."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        kwargs.pop("enabled", None)
        return torch.amp.GradScaler(self.device_type, **kwargs)


@mutant("COL-012", base="cpu")
class KeepsWhatIsSent(_Collective):
    """`all_to_all_single` gives each rank its own."""

    function = "all_to_all_single"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        args[0].copy_(args[1])
        return found


@mutant("COL-012", base="cpu")
class GroupsAreTheWorld(_Collective):
    """A smaller group's sum is that of all ranks."""

    function = "all_reduce"

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("group", None)
        return real(*args, **kwargs)


@mutant("TRN-008")
class ListsOfSixtyFour(Kernel):
    """Of a list of tensors a kernel takes the first 64."""

    operations = ("_foreach_addcdiv_.ScalarList", "_foreach_add_.List", "_fused_adam_")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(*(a[:64] if isinstance(a, list | tuple) else a for a in args), **kwargs)


@mutant("TRN-008")
class OverflowCounts(Kernel):
    """A step that overflowed counts among the good ones after which the scale grows."""

    operations = ("_amp_update_scale_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        count = args[1].clone()
        found = real(*args, **kwargs)
        args[1].copy_(torch.where(args[2] != 0, count, args[1]))
        return found


@mutant("TRN-008")
class LoadsOntoTheCurrent(Fault):
    """`torch.load` puts storages on the current device, whichever `map_location` names."""

    def patches(self) -> list[Any]:
        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            def to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
                place = torch.device(device)
                bare = torch.device(place.type) if place.type == self.device_type else place
                return real(storage, device=bare, non_blocking=non_blocking)

            return to

        return [patched(torch.UntypedStorage, "to", change)]


@mutant("TRN-008")
class KeepsTheFirstRate(Kernel):
    """A fused step takes the learning rate of the first one."""

    operations = ("_fused_adam_", "_fused_adamw_")
    rate: float | None = None

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.rate is None:
            self.rate = kwargs["lr"]
        return real(*args, **{**kwargs, "lr": self.rate})


@mutant("TRN-008")
class DampensTheFirstStep(Kernel):
    """A fused step of SGD dampens the first gradient, too."""

    operations = ("_fused_sgd_", "_fused_sgd_.tensor_lr")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("is_first_step") and kwargs.get("dampening"):
            for buffer in args[2]:
                buffer.zero_()
            kwargs["is_first_step"] = False
        return real(*args, **kwargs)


@mutant("TRN-008")
class LeavesStridedScaled(Kernel):
    """Gradients that are not contiguous stay scaled."""

    operations = ("_amp_foreach_non_finite_check_and_unscale_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        copies = [one if one.is_contiguous() else one.clone() for one in args[0]]
        return real(copies, *args[1:], **kwargs)


class _StopsAll(torch.amp.GradScaler):
    """An optimizer takes no step once another one's gradients were not finite."""

    def _maybe_opt_step(self, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        states = self._per_optimizer_states.values()
        found = [v for one in states for v in one.get("found_inf_per_device", {}).values()]
        if any(value.item() for value in found):
            return None
        return super()._maybe_opt_step(optimizer, state, *args, **kwargs)


@mutant("TRN-008")
class OverflowStopsBoth(Fault):
    """An overflow of one optimizer's gradients keeps the other one from its step."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        return _StopsAll(self.device_type, **kwargs)


@mutant("TRN-009", check="test_TRN_009_models")
class HalvesGradientsUnderAutocast(Kernel):
    """Of 16 bits, the gradient of GELU is half of what it is."""

    operations = ("gelu_backward",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found.mul_(0.5) if args[1].dtype is not torch.float32 else found
