"""Forward and backward in one call: what every engine can do, and a pipeline only so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from anydevice.errors import OptionError
from anydevice.training.stepping import AcceleratorStepping

__all__ = ["AcceleratorWholeSteps"]


@runtime_checkable
class _TrainsWhole(Protocol):
    """An engine that computes forward and backward together."""

    def train_step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        loss_of: Callable[[Any, Any], torch.Tensor],
        targets: Any,
        factor: Any,
        boundary: bool,
    ) -> torch.Tensor:
        """Add a batch's gradients; return its loss."""


class AcceleratorWholeSteps(AcceleratorStepping):
    """The step of an `Accelerator` that a pipeline needs."""

    def train_step(
        self,
        model: nn.Module,
        *args: Any,
        loss_function: Callable[[Any, Any], torch.Tensor] | None = None,
        targets: Any = None,
        num_items: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute a batch's loss and its gradients: the forward and `backward` in one call.

        A pipeline trains only so, since its stages run parts of the batch forward and backward in
        turns; with other engines it is the same as calling both. The optimizer's step follows, as
        after `backward`.

        Args:
            model: prepared.
            *args: of its forward. In a pipeline all processes give the same.
            loss_function: called with the output and the targets, it returns the mean loss; None
                takes ``output.loss``, as transformers models compute it from their labels.
            targets: what ``loss_function`` gets; tensors, whose first dimension is the batch's.
            num_items: see `backward`.
            **kwargs: of the model's forward.

        Returns:
            The loss, detached; in a pipeline the mean over the microbatches, on every process.

        Raises:
            OptionError: targets without a loss function, or a batch that cannot be divided into
                microbatches.

        Example:
            >>> import torch
            >>> from anydevice import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = torch.nn.Linear(2, 1)
            >>> model, optimizer = accelerator.prepare(
            ...     model, torch.optim.SGD(model.parameters(), lr=0.1)
            ... )
            >>> inputs, targets = torch.ones(4, 2), torch.zeros(4, 1)
            >>> loss = accelerator.train_step(
            ...     model, inputs, targets=targets, loss_function=torch.nn.functional.mse_loss
            ... )
            >>> optimizer.step()
        """
        if loss_function is None and targets is not None:
            raise OptionError("train_step: targets are for a loss_function, and none is given")
        loss_of = loss_function or _own_loss
        engine = self.engine
        if not isinstance(engine, _TrainsWhole):
            with self.autocast():
                loss = loss_of(model(*args, **kwargs), targets)
            self.backward(loss, num_items=num_items)
            return loss.detach()
        factor = 1 / self.gradient_state.num_steps if num_items is None else self._weigh(num_items)
        boundary = self.gradient_state.sync_gradients
        return engine.train_step(args, kwargs, loss_of, targets, factor, boundary)


def _own_loss(output: Any, _targets: Any) -> torch.Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise OptionError(
            f"train_step: the model's output, a {type(output).__name__}, has no loss. Give "
            "loss_function= and targets=, or the labels that the model computes a loss from"
        )
    return loss
