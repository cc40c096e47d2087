"""One training step: losses back, gradients accumulated, weighed, clipped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anydevice.errors import OptionError
from anydevice.handlers import AutocastKwargs
from anydevice.training.core import AcceleratorCore

__all__ = ["AcceleratorStepping"]


class _Accumulating:
    """The context of `Accelerator.accumulate`: counts when it is entered."""

    __slots__ = ("_accelerator", "_models", "_open")

    def __init__(self, accelerator: AcceleratorStepping, models: tuple[nn.Module, ...]) -> None:
        self._accelerator = accelerator
        self._models = models
        self._open: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        accelerator = self._accelerator
        state = accelerator.gradient_state
        if state.count(tuple(map(id, self._models))) or state.plugin_kwargs["sync_each_batch"]:
            return
        self._open = contextlib.ExitStack()
        for model in self._models:
            self._open.enter_context(accelerator.engine.no_sync(model))

    def __exit__(self, *error: Any) -> None:
        if self._open is not None:
            self._open.__exit__(*error)
            self._open = None


class AcceleratorStepping(AcceleratorCore):
    """The steps of an `Accelerator`."""

    #: What `backward(num_items=)` was told since the last step: a number or a tensor.
    _counted: Any = None
    #: By what numbers of items are divided where losses are scaled, so that they stay small.
    _unit: float = 1.0

    def accumulate(self, *models: nn.Module) -> contextlib.AbstractContextManager[None]:
        """A context for one batch; every so many of them make one optimizer step.

        Each entry counts, for the models it is given. Within, ``optimizer.step()``,
        ``optimizer.zero_grad()`` and ``scheduler.step()`` do nothing while gradients accumulate.
        The last batch of a loader ends a step.

        Args:
            *models: those that are trained within: all of them exchange gradients together.
        """
        return _Accumulating(self, models)

    @property
    def sync_gradients(self) -> bool:
        """Whether this step ends with the optimizer's."""
        return self.gradient_state.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, sync_gradients: bool) -> None:
        self.gradient_state.sync_gradients = sync_gradients

    @property
    def gradient_accumulation_steps(self) -> int:
        """How many batches make one optimizer step."""
        return self.gradient_state.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, gradient_accumulation_steps: int) -> None:
        if gradient_accumulation_steps < 1:
            raise OptionError(
                f"gradient_accumulation_steps={gradient_accumulation_steps}: give a number from 1"
            )
        self.gradient_state.plugin_kwargs["num_steps"] = gradient_accumulation_steps

    def backward(self, loss: torch.Tensor, num_items: Any = None, **kwargs: Any) -> None:
        """Compute the gradients of ``loss``; use it instead of ``loss.backward()``.

        Args:
            loss: the mean over this process's batch. It is divided by the number of accumulated
                batches.
            num_items: how many items (samples, tokens) ``loss`` is the mean of. Gradients are then
                those of the mean over the items of all accumulated batches of all processes,
                however many each has. All processes give it, or none.
            **kwargs: for ``loss.backward``.

        Raises:
            OptionError: ``loss`` is no tensor, or one of several elements without a ``gradient``;
                ``num_items``, and the engine has gradients of its own.
        """
        if not isinstance(loss, torch.Tensor):
            raise OptionError(
                f"backward: the loss is a {type(loss).__name__}, and no tensor. Give what the loss "
                "function returns, without item() or float()"
            )
        if loss.numel() != 1 and kwargs.get("gradient") is None:
            raise OptionError(
                f"backward: the loss has shape {tuple(loss.shape)}: give one number, such as "
                "loss.mean(), or gradient="
            )
        if num_items is not None:
            self._need_gradients("backward(num_items=)", "weigh the loss by what all ranks counted")
            loss = loss * self._weigh(num_items)
        elif self.engine.accumulates:
            kwargs["boundary"] = self.gradient_state.sync_gradients
        elif (steps := self.gradient_state.plugin_kwargs["num_steps"]) != 1:
            loss = loss / steps
        self.engine.backward(loss, **kwargs)

    def _need_gradients(self, what: str, instead: str) -> None:
        if self.engine.own_gradients:
            name = self.engine.name
            raise OptionError(f"{what}: the engine {name!r} has gradients of its own: {instead}")

    def _weigh(self, num_items: Any) -> Any:
        if self._loss_scaler is not None and self._unit == 1.0:
            box = [max(float(num_items), 1.0)]
            if self.use_distributed:
                dist.broadcast_object_list(box, src=0)
            self._unit = box[0]
        weight = num_items / self._unit
        self._counted = weight if self._counted is None else self._counted + weight
        return weight

    def _finish_weighing(self) -> None:
        """Divide the gradients by what was counted on all processes."""
        if self._counted is None:
            return
        counted, self._counted = self._counted, None
        total = torch.as_tensor(counted, dtype=torch.float32, device=self.device).clone()
        if self.use_distributed:
            dist.all_reduce(total)
        factor = torch.where(total > 0, self.num_processes / total, torch.ones_like(total))
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        part = parameter.grad
                        part = part.to_local() if hasattr(part, "to_local") else part
                        part.mul_(factor.to(part.device))

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model's gradients are not exchanged."""
        return self.engine.no_sync(model)

    @contextlib.contextmanager
    def trigger_sync_in_backward(self, model: nn.Module) -> Iterator[None]:
        """Exchange gradients in the context's backward, though the forward was in `no_sync`."""
        inner: Any = model
        while not hasattr(inner, "require_backward_grad_sync"):
            if not hasattr(inner, "_orig_mod"):
                yield  # it exchanges nothing, or by itself
                return
            inner = inner._orig_mod
        before = inner.require_backward_grad_sync
        inner.require_backward_grad_sync = inner.require_forward_param_sync = True
        inner.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            inner.require_backward_grad_sync = before

    # ------------------------------------------------------------------ gradients

    @property
    def scaler(self) -> Any:
        """The loss scaler, up to date; None where losses are not scaled."""
        if self._loss_scaler is None:
            return None
        self._loss_scaler.update()
        return self._loss_scaler.grad_scaler

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Undo loss scaling in the gradients, once a step; clipping does it by itself.

        Args:
            optimizer: one, or several; None means all that were prepared.
        """
        self._finish_weighing()
        if self._loss_scaler is None:
            return
        chosen = self._optimizers if optimizer is None else optimizer
        for each in chosen if isinstance(chosen, (list, tuple)) else [chosen]:
            self._loss_scaler.unscale(getattr(each, "optimizer", each))

    def _unscale_for(self, parameters: list[torch.Tensor]) -> None:
        self._finish_weighing()
        if self._loss_scaler is None:
            return
        wanted = {id(parameter) for parameter in parameters}
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            if any(id(p) in wanted for group in groups for p in group["params"]):
                self._loss_scaler.unscale(optimizer.optimizer)

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor | None:
        """Scale the gradients so that their norm is at most ``max_norm``.

        Returns:
            Their norm before, over all processes; None while gradients accumulate, when nothing
            is done.
        """
        if not self.gradient_state.sync_gradients:
            return None
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._unscale_for(given)
        return self.engine.clip_grad_norm(given, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float
    ) -> None:
        """Limit each gradient's values to ``clip_value``; nothing while gradients accumulate."""
        if not self.gradient_state.sync_gradients:
            return
        self._need_gradients("clip_grad_value_", "use its gradient_clipping")
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self._unscale_for(given)
        for parameter in given:
            if parameter.grad is not None:
                parameter.grad.clamp_(-clip_value, clip_value)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether some optimizer's last step did nothing, since gradients had overflowed."""
        return any(self.engine.step_was_skipped(optimizer) for optimizer in self._optimizers)

    # ------------------------------------------------------------------ precision and data

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute the context's body in the accelerator's precision."""
        import dataclasses

        chosen = self.engine.setup.autocast
        if autocast_handler is not None:
            chosen = dataclasses.replace(chosen, **vars(autocast_handler))
        with chosen.region():
            yield

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: list[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """Train on though some processes have fewer batches than others.

        Args:
            joinables: the prepared models (and optimizers) that train in the context.
            even_batches: whether prepared loaders repeat samples within the context.

        Raises:
            OptionError: the models are not of a kind that can be joined: only those trained with
                DistributedDataParallel are.
        """
        if not self.use_distributed:
            yield
            return
        from torch.distributed.algorithms.join import Join, Joinable

        if not joinables or not all(isinstance(joinable, Joinable) for joinable in joinables):
            raise OptionError(
                "join_uneven_inputs works with models that DistributedDataParallel trains, and "
                f"this accelerator's engine is {self.engine.name!r}. Use even batches: "
                "DataLoaderConfiguration(even_batches=True)"
            )
        with (
            self._evenness(even_batches),
            Join(joinables, enable=True, throw_on_early_termination=False),
        ):
            yield

    @contextlib.contextmanager
    def _evenness(self, even: bool | None) -> Iterator[None]:
        if even is None:
            yield
            return
        before = [(loader, loader.even_batches) for loader in self._dataloaders]
        for loader, _ in before:
            loader.set_even_batches(even)
        try:
            yield
        finally:
            for loader, was in before:
                loader.set_even_batches(was)
