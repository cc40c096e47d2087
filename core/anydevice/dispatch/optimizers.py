"""Optimizers that were made before their model is dispatched."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from anydevice.errors import ModelError
from anydevice.weights import iter_slots

__all__ = ["check_optimizers"]


def check_optimizers(
    model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
) -> list[torch.optim.Optimizer]:
    """Make sure that optimizers train a model.

    Raises:
        ModelError: one is no optimizer, or holds a parameter that is not the model's.
    """
    found = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    own = {id(slot.get()) for _, slot in iter_slots(model)}
    for number, optimizer in enumerate(found):
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ModelError(f"optimizers[{number}] is a {type(optimizer).__name__}, no optimizer")
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        strays = [i for i, parameter in enumerate(parameters) if id(parameter) not in own]
        if strays:
            raise ModelError(
                f"{type(optimizer).__name__} (optimizers[{number}]) holds {len(strays)} parameters "
                f"that {type(model).__name__} does not have, the first at position {strays[0]}, of "
                f"shape {tuple(parameters[strays[0]].shape)}: pass the optimizers of this model"
            )
    return found
