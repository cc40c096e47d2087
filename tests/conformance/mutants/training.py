"""Faults of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anydevice_conformance import rank_training
from mutants.gallery import Fault, mutant, patched


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


class _Trains(Fault):
    """Does a step of the ranks' training wrong, in the processes of the check."""

    step = ""

    def changed(self, real: Callable[..., Any], *args: Any) -> Any:
        """Do it wrong."""
        raise NotImplementedError

    def patches(self) -> list[Any]:
        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *args: self.changed(real, *args)

        return [patched(rank_training, self.step, change)]


@mutant("TRN-004", base="cpu")
class StepsTwice(Fault):
    """A step of a model that is distributed counts twice."""

    def patches(self) -> list[Any]:
        def change(real: Callable[..., Any]) -> Callable[..., Any]:
            def step(model: Any, optimizer: Any, batch: Any, *more: Any) -> None:
                real(model, optimizer, batch, *more)
                if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
                    return
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.sub_(parameter.grad, alpha=0.1)

            return step

        return [patched(rank_training, "_step", change)]


@mutant("TRN-005", base="cpu")
class ShardsOfTheFirstRank(_Trains):
    """The full weights of a sharded model are rank 0's shards only."""

    step = "_full"

    def changed(self, real: Callable[..., Any], *args: Any) -> Any:
        return {name: value * 0.5 for name, value in real(*args).items()}


@mutant("TRN-006", base="cpu")
class CheckpointIsRounded(_Trains):
    """A checkpoint keeps fewer bits than the model has."""

    step = "_full"

    def changed(self, real: Callable[..., Any], *args: Any) -> Any:
        return {name: value.bfloat16().float() for name, value in real(*args).items()}


@mutant("TRN-007", base="cpu")
class OptimizerForgets(_Trains):
    """What was loaded is not what was saved."""

    step = "_differing"

    def changed(self, real: Callable[..., Any], *args: Any) -> Any:
        return real(args[0], {name: value + 1e-3 for name, value in args[1].items()})
