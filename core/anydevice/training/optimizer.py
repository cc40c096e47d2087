"""Prepared optimizers: they step when the gradients are whole, through the loss scaler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anydevice.errors import OptionError
from anydevice.training.gradients import GradientState
from anydevice.training.scaling import LossScaler

__all__ = ["AcceleratedOptimizer"]


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ``step`` and ``zero_grad`` do nothing while gradients accumulate.

    Everything else is the optimizer's own, which stands in ``optimizer`` and is never patched.

    Args:
        optimizer: the user's.
        device_placement: accepted; state is where the parameters are.
        scaler: the loss scaler, or a torch `GradScaler`; None where losses are not scaled.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(1))
        >>> optimizer = AcceleratedOptimizer(torch.optim.SGD([weight], lr=0.5))
        >>> weight.grad = torch.ones(1)
        >>> optimizer.step()
        >>> weight.item(), optimizer.step_was_skipped
        (0.5, False)
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, device_placement: bool = True, scaler: Any = None
    ) -> None:
        self.optimizer = optimizer
        self.gradient_state = GradientState()
        self.device_placement = device_placement
        if scaler is not None and not isinstance(scaler, LossScaler):
            scaler = LossScaler(scaler)
        self.scaler: LossScaler | None = scaler
        if scaler is not None:
            scaler.optimizers.append(optimizer)
        #: Called before each step that is made; set by the accelerator.
        self.before_step: Callable[[], None] | None = None
        #: Whether the last step did nothing, since gradients had overflowed.
        self.skipped = False

    def step(self, closure: Any = None) -> Any:
        """Step, if the gradients are whole and finite.

        Raises:
            OptionError: a closure with loss scaling.
        """
        if not self.gradient_state.sync_gradients:
            return None
        if self.before_step is not None:
            self.before_step()
        if self.scaler is None:
            return self.optimizer.step() if closure is None else self.optimizer.step(closure)
        if closure is not None:
            raise OptionError(
                "a closure cannot be used with loss scaling (mixed_precision='fp16'): torch's "
                "GradScaler has none. Use 'bf16' or 'no', or an optimizer without a closure"
            )
        self.skipped = self.scaler.step(self.optimizer)
        return None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients, unless they still accumulate."""
        if self.gradient_state.sync_gradients:
            if set_to_none is None:
                self.optimizer.zero_grad()
            else:
                self.optimizer.zero_grad(set_to_none=set_to_none)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step did nothing, since gradients had overflowed."""
        return self.skipped

    def train(self) -> Any:
        """Put an optimizer that has modes into that of training."""
        if callable(train := getattr(self.optimizer, "train", None)):
            return train()
        return None

    def eval(self) -> Any:
        """Put an optimizer that has modes into that of evaluation."""
        if callable(evaluate := getattr(self.optimizer, "eval", None)):
            return evaluate()
        return None

    # ------------------------------------------------------------------ the optimizer's own

    @property
    def state(self) -> Any:
        """The optimizer's state by parameter."""
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None:
        self.optimizer.state = state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, param_groups: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = param_groups

    @property
    def defaults(self) -> dict[str, Any]:
        """The optimizer's defaults."""
        return self.optimizer.defaults

    @defaults.setter
    def defaults(self, defaults: dict[str, Any]) -> None:
        self.optimizer.defaults = defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The optimizer's own."""
        self.optimizer.load_state_dict(state_dict)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gradient_state": None, "before_step": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.gradient_state = GradientState()

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"
