"""DeepSpeed as an engine: the thinnest adapter to its public interface."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from anydevice.engines.base import Engine, Setup
from anydevice.engines.deepspeed_config import DummyOptim, DummyScheduler
from anydevice.engines.deepspeed_options import DeepSpeedPlugin
from anydevice.errors import (
    CheckpointNotFoundError,
    MissingDependencyError,
    ModelError,
    OptionError,
)
from anydevice.nested import recursively_apply

__all__ = ["DeepSpeedEngine"]

#: The folder of DeepSpeed's checkpoint within ours, and its name there.
_FILES: Final = "deepspeed"
_TAG: Final = "state"


class DeepSpeedEngine(Engine):
    """Trains one model with ``deepspeed.initialize``; DeepSpeed accumulates, clips and steps.

    Raises:
        MissingDependencyError: DeepSpeed is not installed.
    """

    name = "deepspeed"
    accumulates = True
    own_gradients = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if importlib.util.find_spec("deepspeed") is None:
            raise MissingDependencyError(
                "DeepSpeedPlugin needs DeepSpeed: pip install deepspeed. Without it, "
                "FullyShardedDataParallelPlugin() shards weights with torch alone"
            )
        self._running: Any = None

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Give the model and its optimizer to DeepSpeed.

        Raises:
            ModelError: not one model with at most one optimizer.
            OptionError: the configuration does not say the batch size, or leaves something open.
        """
        if not models:
            return list(models), list(optimizers)
        if len(models) > 1 or len(optimizers) > 1 or self._running is not None:
            raise ModelError(
                "DeepSpeed trains one model with one optimizer: prepare these together, and make "
                "another Accelerator for another model"
            )
        config = self._config()
        deepspeed: Any = importlib.import_module("deepspeed")
        first: Any = optimizers[0] if optimizers else None
        own = isinstance(first, DummyOptim)
        schedule = self.setup.options.get(DummyScheduler)
        running, optimizer, _, _ = deepspeed.initialize(
            model=models[0],
            optimizer=None if own else first,
            model_parameters=first.params if own else None,
            lr_scheduler=getattr(schedule, "lr_scheduler_callable", None),
            config=config,
        )
        self._running = running
        if self._dtype() is not None:
            running.register_forward_pre_hook(self._convert, with_kwargs=True)
        if not optimizers:
            return [running], []
        return [running], [_Stepping(running, optimizer)]  # type: ignore[list-item]

    def _dtype(self) -> torch.dtype | None:
        """The dtype that DeepSpeed converts the model to; None where it does not."""
        autocast = self.setup.autocast
        return autocast.dtype if autocast.enabled else None

    def _convert(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The model is converted, so its inputs are too."""
        dtype = self._dtype()

        def convert(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return recursively_apply(convert, args), recursively_apply(convert, kwargs)

    def _config(self) -> dict[str, Any]:
        plugin: DeepSpeedPlugin = self.setup.option(DeepSpeedPlugin)
        dtype = self._dtype()
        asked = "no" if dtype is None else "fp16" if dtype == torch.float16 else "bf16"
        plugin.set_mixed_precision(asked)
        config = plugin.deepspeed_config
        says = [name for name in ("fp16", "bf16") if config[name]["enabled"]] or ["no"]
        if says != [asked]:
            raise OptionError(
                f"the DeepSpeed configuration enables {' and '.join(says)}, and the accelerator's "
                f"mixed_precision is {asked!r}: say the same in both, or 'auto' in the "
                "configuration"
            )
        sizes = ("train_micro_batch_size_per_gpu", "train_batch_size")
        if all(config.get(size, "auto") == "auto" for size in sizes):
            raise OptionError(
                "DeepSpeed needs the batch size: prepare the loader in the same call, or say "
                "hf_ds_config={'train_micro_batch_size_per_gpu': N}, with the loader's batch size"
            )
        for size in sizes:
            if config.get(size) == "auto":
                del config[size]
        left = sorted(_left_open(config))
        if left:
            raise OptionError(
                f"the DeepSpeed configuration says 'auto' for {', '.join(left)}, and nothing here "
                "gives a value: say one"
            )
        return config

    def backward(self, loss: torch.Tensor, *, boundary: bool = True, **kwargs: Any) -> None:
        """DeepSpeed's backward, which scales the loss, and exchanges gradients at a ``boundary``.

        It divides by ``gradient_accumulation_steps``, unless told ``scale_wrt_gas=False``.
        """
        self._running.set_gradient_accumulation_boundary(boundary)
        self._running.backward(loss, **kwargs)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Nothing: `backward` is told when to exchange gradients."""
        return contextlib.nullcontext()

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Have DeepSpeed clip in its step.

        Returns:
            The norm of the last step, which is when DeepSpeed computes it; nan before the first.

        Raises:
            OptionError: another norm than the second.
        """
        optimizer = self._running.optimizer
        if not hasattr(optimizer, "clip_grad"):
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        if norm_type != 2.0:
            raise OptionError(f"DeepSpeed clips by the norm of order 2, not {norm_type:g}")
        if math.isfinite(max_norm):
            optimizer.clip_grad = max_norm
        norm = self._running.get_global_grad_norm()
        return torch.as_tensor(math.nan if norm is None else norm)

    def step_was_skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether DeepSpeed did not step, since gradients had overflowed."""
        return not self._running.was_step_applied()

    def save_files(self, folder: Path) -> None:
        """DeepSpeed's own checkpoint: each process's part of the weights and the optimizer."""
        self._running.save_checkpoint(str(folder / _FILES), tag=_TAG)

    def load_files(self, folder: Path) -> None:
        """Read it back, on as many processes as wrote it.

        Raises:
            CheckpointNotFoundError: the folder has none.
        """
        path, _ = self._running.load_checkpoint(str(folder / _FILES), tag=_TAG)
        if path is None:
            raise CheckpointNotFoundError(
                f"{str(folder / _FILES)!r} is no checkpoint of DeepSpeed. Where another engine "
                "wrote it, load its model.safetensors into the model before prepare"
            )

    def state_dict(self, model: nn.Module, optimizer: Any = None, *, full: bool = True) -> Any:
        """The model's whole state; with stage 3, gathered 16-bit weights.

        Raises:
            OptionError: an optimizer's state, which DeepSpeed keeps in files of its own.
        """
        if optimizer is not None:
            raise OptionError(
                "DeepSpeed keeps its optimizer's state itself: save_state(folder) and "
                "load_state(folder) have it written and read"
            )
        if self._running.zero_optimization_stage() == 3:
            state = self._running._zero3_consolidated_16bit_state_dict() or {}
        else:
            state = self.unwrap(model).state_dict()
        if not full:
            return state
        # DeepSpeed's weights are views of one long tensor.
        return {name: tensor.detach().cpu().clone() for name, tensor in state.items()}

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The user's own module."""
        inner: nn.Module = getattr(model, "module", model)
        return inner


class _Stepping:
    """An optimizer whose step is DeepSpeed's: it accumulates and clears gradients itself."""

    def __init__(self, running: Any, optimizer: Any) -> None:
        self._running = running
        self._optimizer = optimizer

    def step(self) -> None:
        self._running.step()

    def zero_grad(self, set_to_none: bool = True) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_running", "_optimizer"):
            raise AttributeError(name)
        return getattr(self._optimizer, name)


def _left_open(config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Names of what is still "auto"."""
    for key, value in config.items():
        if value == "auto":
            yield f"{prefix}{key}"
        elif isinstance(value, Mapping):
            yield from _left_open(value, f"{prefix}{key}.")
