"""What DeepSpeed's configuration leaves open, filled in from the things that are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from anydevice.engines import DeepSpeedPlugin, DummyOptim, DummyScheduler
from anydevice.errors import OptionError
from anydevice.training.gradients import GradientState
from anydevice.training.scheduler import AcceleratedScheduler

__all__ = ["DeepSpeedSchedulerWrapper", "complete", "refuse_stand_ins"]


class DeepSpeedSchedulerWrapper(AcceleratedScheduler):
    """A schedule that DeepSpeed steps, and saves, together with its optimizer.

    Args:
        scheduler: DeepSpeed's.
        optimizers: those that it changes.

    Example:
        >>> import torch
        >>> from anydevice.utils import DeepSpeedSchedulerWrapper
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.5)
        >>> schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        >>> DeepSpeedSchedulerWrapper(schedule, optimizer).step()
        >>> schedule.get_last_lr()
        [0.5]
    """

    def __init__(self, scheduler: Any, optimizers: Any) -> None:
        super().__init__(scheduler, optimizers)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the optimizer's step has done it."""


def complete(plugin: DeepSpeedPlugin, things: Sequence[Any], gradients: GradientState) -> None:
    """Fill in what the configuration calls "auto", or must say and does not.

    Args:
        plugin: with the configuration.
        things: what is prepared: loaders say the batch size, stand-ins the rates.
        gradients: how many batches make a step; told by the configuration where that says it.

    Raises:
        OptionError: the number of batches is another one in both.
    """
    config = plugin.hf_ds_config
    plugin.fill(gradient_accumulation_steps=gradients.num_steps)
    steps = config.get_value("gradient_accumulation_steps")
    if gradients.num_steps not in (1, steps):
        raise OptionError(
            f"the DeepSpeed configuration has gradient_accumulation_steps={steps}, and the "
            f"accelerator {gradients.num_steps}: say the same in both, or 'auto' in the "
            "configuration"
        )
    gradients.plugin_kwargs["num_steps"] = steps
    sizes = [size for size in map(_batch_size, things) if size]
    if sizes and config.get_value("train_batch_size", "auto") == "auto":
        chosen = min(sizes) if plugin.is_train_batch_min else max(sizes)
        plugin.fill(train_micro_batch_size_per_gpu=chosen)
    values: dict[str, Any] = {"gradient_clipping": 1.0}
    for thing in things:
        if isinstance(thing, nn.Module):
            values |= _of_model(thing)
        elif isinstance(thing, DummyOptim):
            values |= _of_optimizer(thing)
        elif isinstance(thing, DummyScheduler):
            values |= _of_schedule(thing)
        elif isinstance(thing, torch.optim.Optimizer):
            config.config.setdefault("zero_allow_untested_optimizer", True)
            if config.is_offload():
                config.config.setdefault("zero_force_ds_cpu_optimizer", False)
    plugin.deepspeed_config_process(must_match=False, **values)


def refuse_stand_ins(things: Iterable[Any]) -> None:
    """Refuse DeepSpeed's stand-ins where DeepSpeed does not train.

    Raises:
        OptionError: names the class and what to give instead.
    """
    for thing in things:
        if isinstance(thing, DummyOptim | DummyScheduler):
            raise OptionError(
                f"{type(thing).__name__} is for DeepSpeed, which makes the optimizer and the "
                "schedule from its configuration: give a DeepSpeedPlugin, or torch's own"
            )


def _batch_size(thing: Any) -> int | None:
    if not isinstance(thing, torch.utils.data.DataLoader):
        return None
    size = getattr(thing, "batch_size", None)
    return size or getattr(getattr(thing, "batch_sampler", None), "batch_size", None)


def _of_optimizer(stand_in: DummyOptim) -> dict[str, Any]:
    values = {"lr": stand_in.lr, "weight_decay": stand_in.weight_decay, **stand_in.kwargs}
    named = {f"optimizer.params.{name}": value for name, value in values.items()}
    return named | {
        "scheduler.params.warmup_min_lr": 0,
        "scheduler.params.warmup_max_lr": stand_in.lr,
    }


def _of_schedule(stand_in: DummyScheduler) -> dict[str, Any]:
    values = {
        "total_num_steps": stand_in.total_num_steps,
        "warmup_num_steps": max(1, stand_in.warmup_num_steps),  # DeepSpeed takes no 0
        **stand_in.kwargs,
    }
    return {f"scheduler.params.{name}": value for name, value in values.items()}


def _of_model(model: nn.Module) -> dict[str, Any]:
    """Sizes of buffers that are meant to follow the model's width, as transformers has them."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    widths = getattr(config, "hidden_size", None) or getattr(config, "hidden_sizes", None)
    if not widths:
        return {}
    width = max(widths) if isinstance(widths, (list, tuple)) else widths
    return {
        "zero_optimization.reduce_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
    }
