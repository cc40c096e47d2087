"""Data parallelism: each process has the whole model, and gradients are averaged."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from anydevice.engines.ddp_options import DistributedDataParallelKwargs
from anydevice.engines.placing import placed_on
from anydevice.engines.single import SingleEngine

__all__ = ["DDPEngine"]


class DDPEngine(SingleEngine):
    """torch's `DistributedDataParallel`."""

    name = "ddp"

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model in its precision, exchanging gradients; one without any trains nothing."""
        model = super().wrap(model)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model
        options: DistributedDataParallelKwargs = self.setup.option(DistributedDataParallelKwargs)
        device = self.setup.state.device
        own = device.index is not None and not placed_on(model) and self.setup.device_placement
        wrapped = DistributedDataParallel(
            model, device_ids=[device.index] if own else None, **options.for_torch()
        )
        options.register_comm_hook(wrapped)
        return wrapped

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """DDP's own context, through whatever was put around it."""
        inner: Any = model
        while isinstance(inner, nn.Module) and not isinstance(inner, DistributedDataParallel):
            inner = getattr(inner, "_orig_mod", None)
        return contextlib.nullcontext() if inner is None else inner.no_sync()
