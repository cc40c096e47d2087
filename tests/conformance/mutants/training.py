"""Faults of training."""

from __future__ import annotations

from typing import Any

import torch

from mutants.gallery import Fault, mutant


@mutant("TRN-001")
class AutocastsToAnything(Fault):
    """float64 is named, in which autocast does not compute."""

    def autocast_dtypes(self) -> frozenset[torch.dtype]:
        return super().autocast_dtypes() | {torch.float64}


@mutant("TRN-001")
class DtypesAreAList(Fault):
    """The answer is a list."""

    def autocast_dtypes(self) -> Any:
        return list(super().autocast_dtypes())


class _NeverSkips(torch.amp.GradScaler):
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        self.unscale_(optimizer)
        result: float | None = optimizer.step(*args, **kwargs)
        return result


class _NeverFalls(torch.amp.GradScaler):
    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(self.get_scale())


class _NeverUnscales(torch.amp.GradScaler):
    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result: float | None = optimizer.step(*args, **kwargs)
        return result

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        pass


@mutant("TRN-002")
class StepsOnInfinity(Fault):
    """A step with infinite gradients is taken."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        return _NeverSkips(self.device_type, **kwargs)


@mutant("TRN-002")
class ScaleNeverFalls(Fault):
    """The scale stays after an overflow."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        return _NeverFalls(self.device_type, **kwargs)


@mutant("TRN-003")
class GradientsStayScaled(Fault):
    """The step uses the scaled gradients."""

    def new_grad_scaler(self, **kwargs: Any) -> Any:
        return _NeverUnscales(self.device_type, **kwargs)
