"""Loss scaling for several optimizers: unscaled once a step, updated when all have stepped."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["LossScaler"]


class LossScaler:
    """A `GradScaler` and what this step's optimizers have done with it.

    The scale must not change between the backward passes and the steps that belong together: so
    it is updated when every optimizer has stepped, or before the next backward pass.
    """

    def __init__(self, scaler: Any) -> None:
        self.grad_scaler = scaler
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
            self.grad_scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Step, unless gradients have overflowed; return whether it was skipped."""
        if id(optimizer) in self._stepped:
            self.update()
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

    def _overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        if not self.grad_scaler.is_enabled():
            return False
        found = self.grad_scaler._found_inf_per_device(optimizer)
        return any(bool(value.item()) for value in found.values())
