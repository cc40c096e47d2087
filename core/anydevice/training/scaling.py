"""Loss scaling for several optimizers: unscaled once a step, updated when all have stepped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["LossScaler"]


class LossScaler:
    """A `GradScaler` and what this step's optimizers have done with it.

    The scale must not change between the backward passes and the steps that belong together: so
    it is updated when every optimizer has stepped, or before the next backward pass.

    Args:
        scaler: torch's.
        in_parts: processes have different gradients, or parts of them: a step is then skipped by
            all where one's have overflowed. All of them unscale and step alike.
    """

    def __init__(self, scaler: Any, in_parts: bool = False) -> None:
        self.grad_scaler = scaler
        self.in_parts = in_parts
        self.optimizers: list[torch.optim.Optimizer] = []
        self._unscaled: set[int] = set()
        self._stepped: set[int] = set()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss, scaled."""
        self.update()
        scaled: torch.Tensor = self.grad_scaler.scale(loss)
        return scaled

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide an optimizer's gradients by the scale, unless that is done."""
        key = id(optimizer)
        if key not in self._unscaled and key not in self._stepped:
            self._unscaled.add(key)
            if not self.in_parts:
                self.grad_scaler.unscale_(optimizer)
                return
            with _local(optimizer):
                self.grad_scaler.unscale_(optimizer)
            if dist.is_initialized() and self.grad_scaler.is_enabled():
                self._overflow_together(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, unless gradients have overflowed; return whether it was skipped."""
        if id(optimizer) in self._stepped:
            self.update()
        if self.in_parts:
            self.unscale(optimizer)
        self.grad_scaler.step(optimizer)
        skipped = self._overflowed(optimizer)
        self._stepped.add(id(optimizer))
        if self._stepped >= {id(known) for known in self.optimizers}:
            self.update()
        return skipped

    def update(self) -> None:
        """Change the scale as the last steps demand it; nothing where none was made."""
        if self._stepped:
            self._stepped.clear()
            self._unscaled.clear()
            self.grad_scaler.update()

    def _overflow_together(self, optimizer: torch.optim.Optimizer) -> None:
        """Let every process know where one's gradients have overflowed."""
        found = self.grad_scaler._found_inf_per_device(optimizer)
        if not found:  # it has no gradient, and others may have
            device = self.grad_scaler._scale.device
            found[device] = torch.zeros((), device=device)
        for value in found.values():
            dist.all_reduce(value, op=dist.ReduceOp.MAX)

    def _overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self.grad_scaler.is_enabled():
            return False
        found = self.grad_scaler._found_inf_per_device(optimizer)
        return any(bool(value.item()) for value in found.values())


@contextlib.contextmanager
def _local(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let an optimizer show this process's parts of its gradients, as plain tensors.

    torch's scaler cannot take divided and undivided gradients together.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [{"params": [_part(p) for p in g["params"]]} for g in groups]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def _part(parameter: torch.Tensor) -> torch.Tensor:
    if not hasattr(parameter, "to_local"):
        return parameter
    part: torch.Tensor = parameter.to_local().detach()
    grad: Any = parameter.grad
    if grad is not None:
        part.grad = grad.to_local()
    return part
