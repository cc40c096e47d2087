"""Megatron-LM as an engine: the adapter to Megatron-core's public interface."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.engines.base import Engine, Setup
from anydevice.engines.megatron.device import MegatronDevice
from anydevice.engines.megatron.groups import divide_processes, start_groups
from anydevice.engines.megatron.models import build_model, join_arguments, read_model
from anydevice.engines.megatron.optimizer import MegatronOptimizer, build_optimizer
from anydevice.engines.megatron.options import MegatronLMPlugin
from anydevice.engines.megatron.running import MegatronModel
from anydevice.engines.megatron.states import MegatronStates
from anydevice.engines.renaming import follow
from anydevice.errors import MissingDependencyError, ModelError, OptionError

__all__ = ["MegatronLMEngine"]

_MODULES: Final = (
    "parallel_state",
    "tensor_parallel",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "transformer",
    "distributed",
    "pipeline_parallel",
    "optimizer",
)


class MegatronLMEngine(Engine):
    """Trains one transformers model as Megatron-core's `GPTModel`, on this process's device.

    The model's weights are given to Megatron, and come back under transformers' names.

    Raises:
        MissingDependencyError: Megatron-core is not installed.
        OptionError: degrees that do not fit the processes, or fp16.
    """

    name = "megatron_lm"
    own_gradients = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if importlib.util.find_spec("megatron") is None:
            raise MissingDependencyError(
                "MegatronLMPlugin needs Megatron-core: pip install megatron-core. Without it, for "
                "tensor parallelism of an ordinary model: Accelerator(parallelism_config="
                "ParallelismConfig(tp_size=..., dp_shard_size=...))"
            )
        if setup.scaler is not None:
            raise OptionError(
                "mixed_precision='fp16' with MegatronLMPlugin is not there: use 'bf16' or 'no'"
            )
        self._plugin: MegatronLMPlugin = setup.option(MegatronLMPlugin)
        sizes = divide_processes(self._plugin, setup.state.num_processes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that it would use if they were there
            for module in _MODULES:
                importlib.import_module(f"megatron.core.{module}")
        self._others = self._read_others()
        self._here = MegatronDevice(setup.state.device_backend, setup.state.device)
        self._here.install()
        setup.mesh = start_groups(self._here, sizes)
        self._running: MegatronModel | None = None
        self._user: nn.Module | None = None
        self._states: MegatronStates | None = None

    # ------------------------------------------------------------------ before work starts

    def _read_others(self) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """``other_megatron_args`` by Megatron's configuration that has such fields."""
        core = {name: importlib.import_module(f"megatron.core.{name}") for name in _MODULES}
        kinds = (
            core["transformer"].TransformerConfig,
            core["optimizer"].OptimizerConfig,
            core["distributed"].DistributedDataParallelConfig,
        )
        known = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
        given = self._plugin.other_megatron_args or {}
        unknown = [name for name in given if not any(name in names for names in known)]
        if unknown:
            raise OptionError(
                f"MegatronLMPlugin(other_megatron_args={{{unknown[0]!r}: ...}}): Megatron-core's "
                f"{', '.join(kind.__name__ for kind in kinds)} have no such field. Leave it out"
            )
        one, two, three = ({k: v for k, v in given.items() if k in names} for names in known)
        return one, two, three

    # ------------------------------------------------------------------ the protocol

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Give the model's weights to Megatron, and the optimizer's choices.

        Raises:
            ModelError: not one model with at most one optimizer, or one that is not converted.
            OptionError: choices that do not fit.
        """
        given: Sequence[Any] = optimizers
        fresh = [o for o in given if not isinstance(o, MegatronOptimizer)]
        if not models and not fresh:
            return [], list(optimizers)
        if len(models) != 1 or len(fresh) > 1 or self._running is not None:
            raise ModelError(
                "MegatronLMPlugin trains one model with one optimizer: prepare these together, in "
                "one call, and make another Accelerator for another model"
            )
        user: Any = models[0]
        arguments = join_arguments(read_model(user, self._plugin, self._dtype()), self._others[0])
        core: Any = importlib.import_module("megatron.core.transformer")
        with self._here.working():
            config = core.TransformerConfig(**arguments)
            with self._here.device:
                stage = build_model(user, config)
            self._states = MegatronStates(user, stage)
            self._states.load_weights(dict(user.state_dict()))
            numbers = self._states.choose_trained(fresh)
            running = self._wrap(stage, config)
        model = MegatronModel(running, stage, user.config, self._plugin, self._here)
        model.train(user.training)
        if fresh:
            model.optimizer = self._optimizer(fresh[0], running, numbers)
        with follow(user, fresh):
            user.to("meta")  # the weights are Megatron's from here on, and take no place twice
            user.tie_weights()
        self._running, self._user = model, user
        return [model], [model.optimizer] if fresh else []

    def _dtype(self) -> torch.dtype:
        """Of the weights that Megatron computes with."""
        autocast = self.setup.autocast
        return (autocast.enabled and autocast.dtype) or torch.float32

    def _wrap(self, stage: Any, config: Any) -> Any:
        """The stage as Megatron's `DistributedDataParallel`."""
        parallel: Any = importlib.import_module("megatron.core.distributed")
        module: Any = importlib.import_module("megatron.core.transformer.module")
        choices = {"use_distributed_optimizer": bool(self._plugin.use_distributed_optimizer)}
        inner = module.Float16Module(config, stage) if config.bf16 else stage
        return parallel.DistributedDataParallel(
            config,
            parallel.DistributedDataParallelConfig(
                **{"grad_reduce_in_fp32": True} | join_arguments(choices, self._others[2])
            ),
            inner,
        )

    def _optimizer(
        self, optimizer: torch.optim.Optimizer, running: Any, numbers: Mapping[nn.Parameter, int]
    ) -> MegatronOptimizer:
        arguments = {
            "bf16": self._dtype() == torch.bfloat16,
            "params_dtype": self._dtype(),
            "clip_grad": float(self._plugin.gradient_clipping or 0),
            "use_distributed_optimizer": bool(self._plugin.use_distributed_optimizer),
        }
        arguments = join_arguments(arguments, self._others[1])
        with self._here.working():
            made = build_optimizer(optimizer, running, numbers, arguments)
        return MegatronOptimizer(optimizer, made, running, self._here)

    def unwrap(self, model: nn.Module) -> nn.Module:
        """The transformers model; its weights are on the meta device, since Megatron has them."""
        return self._user if model is self._running and self._user is not None else model

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Say how much the loss counts: its gradients are computed already.

        Raises:
            OptionError: a loss of evaluation.
        """
        if not loss.requires_grad:
            raise OptionError(
                "MegatronLMPlugin: backward of a loss that was computed in evaluation: call "
                "model.train() before, and no torch.no_grad() around it"
            )
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients of calls within are added up, and not exchanged."""
        running = self._running
        if running is None:
            yield
            return
        before, running.exchanging = running.exchanging, False
        try:
            yield
        finally:
            running.exchanging = before

    def clip_grad_norm(
        self, parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Have the next step clip the gradient of the whole model.

        Raises:
            OptionError: another norm than 2.
        """
        if norm_type != 2:
            raise OptionError(
                f"clip_grad_norm_(norm_type={norm_type}): Megatron knows the norm 2 only"
            )
        running = self._running
        if running is None or running.optimizer is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        norm: torch.Tensor = running.optimizer.clip(float(max_norm))
        return norm

    def state_dict(self, model: nn.Module, optimizer: Any = None, *, full: bool = True) -> Any:
        """The whole state under transformers' names; all processes call this.

        Args:
            model: the prepared model.
            optimizer: the optimizer whose state is meant.
            full: on the main process only, and empty on others; else on each.
        """
        keep = not full or self.setup.state.is_main_process
        if self._states is None:
            return super().state_dict(model, optimizer, full=full)
        with self._here.working():
            if optimizer is None:
                return self._states.weights(keep)
            if self._plugin.no_save_optim:
                return self._states.no_states(self._inner(optimizer))
            return self._states.optimizer(self._inner(optimizer), keep)

    def load_state_dict(
        self, model: nn.Module, state: Any, optimizer: Any = None, **kwargs: Any
    ) -> Any:
        """Take a whole state that each process has."""
        if self._states is None:
            return super().load_state_dict(model, state, optimizer, **kwargs)
        made = None if optimizer is None else self._inner(optimizer)
        with self._here.working():
            if made is None:
                self._states.load_weights(state, strict=kwargs.get("strict", True))
                if self._running is not None and self._running.optimizer is not None:
                    self._running.optimizer.reload()
            elif not self._plugin.no_load_optim:
                self._states.load_optimizer(made, state)
        return None

    @staticmethod
    def _inner(optimizer: Any) -> MegatronOptimizer:
        made: MegatronOptimizer = getattr(optimizer, "optimizer", optimizer)
        return made
