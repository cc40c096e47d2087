"""One process: the model on its device, in its precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from anydevice.engines.base import Engine
from anydevice.engines.placing import check_placement, place_optimizer
from anydevice.engines.precise import MixedPrecision
from anydevice.engines.renaming import follow
from anydevice.modules import extract_model_from_parallel

__all__ = ["SingleEngine"]


class SingleEngine(Engine):
    """Trains a model on one device, or one that is dispatched over several."""

    name = "single"

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Move to the device and set the precision; optimizers follow the parameters."""
        prepared = []
        for model in models:
            with follow(model, optimizers, with_state=True):
                placed = self.place(model)
            prepared.append(self.wrap(placed))
        for optimizer in optimizers:
            place_optimizer(optimizer)
        return prepared, list(optimizers)

    def place(self, model: nn.Module) -> nn.Module:
        """The model on this process's device; one that is dispatched stays where it is."""
        dispatched = check_placement(model, self.setup.state)
        if dispatched or not self.setup.device_placement:
            return model
        return model.to(self.setup.state.device)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model in the precision that was asked for."""
        return MixedPrecision(model, self.setup.autocast) if self.setup.autocast.active else model

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module, out of all that was put around it."""
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        while inner is not model:  # a compiled one may stand within, or around
            model, inner = inner, extract_model_from_parallel(inner, keep_torch_compile=False)
        return inner
