"""Local SGD: each process trains by itself, and weights are averaged every so many steps."""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anydevice.errors import OptionError

__all__ = ["LocalSGD"]


class LocalSGD:
    """A context in which a model's gradients are not exchanged, but its weights averaged.

    Call `step` after each optimizer step. At the end of the context weights are averaged, too.

    Args:
        accelerator: the `Accelerator` that prepared the model.
        model: a prepared model.
        local_sgd_steps: after how many steps weights are averaged.
        enabled: False exchanges gradients as ever.

    Raises:
        OptionError: weights are sharded, so that no process has a model of its own.

    Example:
        >>> from torch import nn
        >>> from anydevice import LocalSGD
        >>> from anydevice import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = accelerator.prepare(nn.Linear(1, 1))
        >>> with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        ...     local_sgd.step()
    """

    def __init__(
        self, accelerator: Any, model: nn.Module, local_sgd_steps: int, enabled: bool = True
    ) -> None:
        if enabled and accelerator.use_distributed and accelerator.engine.name != "ddp":
            raise OptionError(
                "LocalSGD needs a whole model on each process (DistributedDataParallel), and this "
                f"accelerator's engine is {accelerator.engine.name!r}. Leave LocalSGD out"
            )
        if local_sgd_steps < 1:
            raise OptionError(f"local_sgd_steps={local_sgd_steps}: give a number from 1")
        self.enabled = enabled and accelerator.use_distributed
        self.accelerator = accelerator
        self.model = model
        self.local_sgd_steps = local_sgd_steps
        self.num_steps = 0
        self._context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._context = self.accelerator.no_sync(self.model)
            self._context.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            self._context.__exit__(kind, error, trace)
            if kind is None:
                self._average()

    def step(self) -> None:
        """Count an optimizer step; every so many of them weights are averaged."""
        if not self.accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.enabled and self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def _average(self) -> None:
        self.accelerator.wait_for_everyone()
        with torch.no_grad():
            for parameter in self.model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= self.accelerator.num_processes
