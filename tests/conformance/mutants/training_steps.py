"""Faults of autocast and of loss scalers that a first step does not show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mutants.collectives import _Collective
from mutants.dtypes import _Operation
from mutants.gallery import Fault, mutant


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
