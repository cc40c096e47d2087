"""`Accelerator`: a plain training loop on one device, several processes or several machines."""

from __future__ import annotations

import contextlib
import gc
import os
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from anydevice.arguments import names_unknown_arguments
from anydevice.data import DataLoaderConfiguration
from anydevice.engines import ParallelismConfig
from anydevice.errors import OptionError
from anydevice.handlers import InitProcessGroupKwargs
from anydevice.training.arguments import check_arguments
from anydevice.training.checkpoints import BackgroundSave
from anydevice.training.compiling import TorchDynamoPlugin
from anydevice.training.gradients import GradientAccumulationPlugin, GradientState
from anydevice.training.persistence import AcceleratorPersistence
from anydevice.training.preparing import AcceleratorPreparing
from anydevice.training.project import ProjectConfiguration
from anydevice.training.scheduler import SchedulerUnit
from anydevice.training.setup import build_engine, read_handlers
from anydevice.training.state import AcceleratorState
from anydevice.training.tracking import choose_trackers
from anydevice.training.whole_steps import AcceleratorWholeSteps

__all__ = ["Accelerator"]

_UNSET: Final[Any] = object()


@names_unknown_arguments
class Accelerator(AcceleratorPreparing, AcceleratorWholeSteps, AcceleratorPersistence):
    """Makes a training loop run on one device, several processes or several machines.

    Args:
        device_placement: put models and batches on the device.
        split_batches: see `DataLoaderConfiguration`.
        mixed_precision: "no", "fp16" or "bf16".
        gradient_accumulation_steps: how many batches make one optimizer step.
        cpu: use the host, though there is an accelerator.
        dataloader_config: choices about loaders.
        deepspeed_plugin, deepspeed_plugins: train with DeepSpeed.
        fsdp_plugin: shard weights, gradients and optimizer state.
        torch_tp_plugin: the old name for ``ParallelismConfig(tp_size=...)``.
        megatron_lm_plugin: train with Megatron-LM.
        rng_types: kinds of random state that are made equal on all processes before each epoch.
        log_with: trackers: names, `GeneralTracker` objects, or a list of them.
        project_dir: the run's folder.
        project_config: where files go and how checkpoints are named.
        gradient_accumulation_plugin: choices about accumulation, instead of the steps alone.
        step_scheduler_with_optimizer: prepared schedulers follow their optimizers.
        kwargs_handlers: handlers of torch's own things, one of each class.
        dynamo_backend, dynamo_plugin: compile prepared models.
        parallelism_config: divide the processes into a mesh.
        scheduler_unit: in what schedules are counted: "batches" of one process (each optimizer
            step is then as many as there are processes), or optimizer "steps".
        engine: the name of an engine, instead of the one that follows from the plugins.

    Raises:
        OptionError: choices that exclude each other, or that this device or engine has not.
        ProcessGroupError: the environment asks for processes that do not come.

    Example:
        >>> import torch
        >>> from anydevice import Accelerator
        >>> accelerator = Accelerator(cpu=True)
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer = accelerator.prepare(model, optimizer)
        >>> loss = model(torch.ones(4, 2)).mean()
        >>> accelerator.backward(loss)
        >>> optimizer.step()
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool = _UNSET,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: list[Any] | None = None,
        log_with: Any = None,
        project_dir: str | os.PathLike[str] | None = None,
        project_config: ProjectConfiguration | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: list[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        deepspeed_plugins: Any = None,
        parallelism_config: ParallelismConfig | None = None,
        *,
        scheduler_unit: SchedulerUnit = "batches",
        engine: str | None = None,
    ) -> None:
        check_arguments(locals())
        _exclude("dynamo_backend", dynamo_backend, "dynamo_plugin", dynamo_plugin)
        _exclude("deepspeed_plugin", deepspeed_plugin, "deepspeed_plugins", deepspeed_plugins)
        _exclude("parallelism_config", parallelism_config, "torch_tp_plugin", torch_tp_plugin)
        self.project_configuration = project_config or ProjectConfiguration(
            None if project_dir is None else os.fspath(project_dir)
        )
        if project_dir is not None and self.project_dir is None:
            self.project_configuration.set_directories(project_dir)
        self.dataloader_config = dataloader_config or DataLoaderConfiguration()
        if split_batches is not _UNSET:
            self.dataloader_config.split_batches = split_batches
        self._handlers = read_handlers(kwargs_handlers)
        group: InitProcessGroupKwargs | None = self._handlers.get(InitProcessGroupKwargs)
        deepspeed = deepspeed_plugin or _one(deepspeed_plugins)
        if torch_tp_plugin is not None:
            parallelism_config = ParallelismConfig(tp_size=torch_tp_plugin.tp_size)
        self.dynamo_plugin = dynamo_plugin or TorchDynamoPlugin(backend=dynamo_backend)
        self.state = AcceleratorState(
            mixed_precision,
            cpu,
            dynamo_plugin=self.dynamo_plugin,
            deepspeed_plugin=deepspeed,
            megatron_lm_plugin=megatron_lm_plugin,
            _from_accelerator=True,
            **(group.to_kwargs() if group is not None else {}),
        )
        self.gradient_state = GradientState(
            _accumulation(gradient_accumulation_steps, gradient_accumulation_plugin)
        )
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer
        self.scheduler_unit = scheduler_unit
        self.rng_types = rng_types
        self.log_with = choose_trackers(log_with, self.logging_dir)
        self.trackers = []
        self._models, self._optimizers, self._schedulers = [], [], []
        self._dataloaders, self._custom_objects = [], []
        self._save_hooks, self._load_hooks = OrderedDict(), OrderedDict()
        self._background = BackgroundSave(self.state._partial)
        self._trigger = False
        self._resumes = self.dataloader_config.use_stateful_dataloader
        plugins = {
            "fsdp": fsdp_plugin,
            "deepspeed": deepspeed,
            "megatron": megatron_lm_plugin,
            "parallel": parallelism_config,
        }
        self.engine = build_engine(
            self.state,
            self._handlers,
            device_placement=device_placement,
            plugins=plugins,
            engine=engine,
        )
        self._loss_scaler = self.engine.setup.scaler

    # ------------------------------------------------------------------ models

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The user's own module, out of all that `prepare` put around it.

        Args:
            model: prepared or not.
            keep_fp32_wrapper: accepted; the module itself is never changed for precision.
            keep_torch_compile: give the compiled module where it was compiled.
        """
        plain = self.engine.unwrap(model)
        if keep_torch_compile and hasattr(model, "_orig_mod") and model._orig_mod is plain:
            return model
        return plain

    def verify_device_map(self, model: nn.Module) -> bool:
        """Whether the model, or a part of it, is dispatched over several devices."""
        return any(
            len(getattr(module, "hf_device_map", None) or ()) > 1 for module in model.modules()
        )

    def free_memory(self, *objects: Any) -> list[Any]:
        """Forget all that was prepared, and give the device's cached memory back.

        Returns:
            As many None as objects were given: ``model, loader = free_memory(model, loader)``.
        """
        self._models.clear()
        self._optimizers.clear()
        self._schedulers.clear()
        self._dataloaders.clear()
        if self._loss_scaler is not None:
            self._loss_scaler.optimizers.clear()
        nothing = [None] * len(objects)
        del objects
        gc.collect()
        device = self.device
        if device.index is not None:
            self.state.device_backend.empty_cache(device.index)
        return nothing

    def clear(self, *objects: Any) -> list[Any]:
        """The same as `free_memory`."""
        return self.free_memory(*objects)

    # ------------------------------------------------------------------ engines of others

    @property
    def deepspeed_plugin(self) -> Any:
        """The plugin of DeepSpeed; None where it does not train."""
        return self.state.deepspeed_plugin

    @property
    def fp8_backend(self) -> None:
        """None: fp8 is torchao's, applied to the model before it is prepared."""
        return

    @contextlib.contextmanager
    def maybe_context_parallel(
        self,
        buffers: Any = None,
        buffer_seq_dims: Any = None,
        no_restore_buffers: Any = None,
    ) -> Iterator[None]:
        """Nothing: sequences are never divided here (see `ParallelismConfig`)."""
        yield

    def __repr__(self) -> str:
        return f"Accelerator(engine={self.engine.name!r}, device={str(self.device)!r})"


def _exclude(name: str, value: Any, other: str, given: Any) -> None:
    if value is not None and given is not None:
        raise OptionError(f"{name} and {other} say the same: give one")


def _one(plugins: Any) -> Any:
    if isinstance(plugins, dict):
        if len(plugins) > 1:
            raise OptionError(
                f"deepspeed_plugins has {len(plugins)} plugins ({', '.join(plugins)}): one "
                "Accelerator trains with one; make an Accelerator for each"
            )
        return next(iter(plugins.values()), None)
    return plugins


def _accumulation(
    steps: int, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    if plugin is not None:
        if steps != 1:
            raise OptionError(
                "gradient_accumulation_steps and gradient_accumulation_plugin say the same: give "
                "one"
            )
        return plugin
    return GradientAccumulationPlugin(num_steps=None if steps == 1 else steps)
