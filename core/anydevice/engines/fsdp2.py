"""Fully sharded data parallelism: weights, gradients and optimizer state in parts."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from anydevice.engines.fsdp_options import FullyShardedDataParallelPlugin
from anydevice.engines.meshes import mesh_of
from anydevice.engines.placing import check_placement
from anydevice.engines.renaming import follow
from anydevice.engines.single import SingleEngine
from anydevice.engines.states import get_state, set_state
from anydevice.engines.wrapping import units_of
from anydevice.errors import MissingDependencyError

__all__ = ["FSDP2Engine", "why_not_shardable"]


def why_not_shardable(device_type: str) -> str:
    """Why this torch's `fully_shard` does not run on a device type; empty where it may.

    It orders its work by events, which the host's streams do not record in torch 2.6.
    """
    try:
        stream = getattr(torch.get_device_module(device_type), "Stream", None)
    except RuntimeError:  # a device without a module of torch's
        return ""
    if stream is None or hasattr(stream, "record_event"):
        return ""
    return (
        f"torch {torch.__version__} cannot shard a model on {device_type}: its streams there "
        "record no events"
    )


class FSDP2Engine(SingleEngine):
    """torch's `fully_shard`, over the model's blocks.

    The module stays the user's own object. Its parameters become DTensors; an optimizer is
    made to follow them by name.
    """

    name = "fsdp2"
    sharded = True

    @property
    def plugin(self) -> FullyShardedDataParallelPlugin:
        """The user's choices."""
        chosen: FullyShardedDataParallelPlugin = self.setup.option(FullyShardedDataParallelPlugin)
        return chosen

    def prepare(
        self, models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        """Shard each model in place; optimizers follow the parameters.

        Raises:
            MissingDependencyError: this torch cannot shard on such a device.
        """
        reason = why_not_shardable(self.setup.state.device.type)
        if reason:
            raise MissingDependencyError(f"{reason}. Install a newer torch, or leave FSDP out")
        for model in models:
            with follow(model, optimizers):
                self._shard(self.before(model))
        return list(models), list(optimizers)

    def before(self, model: nn.Module) -> nn.Module:
        """The model as it is to be sharded: with the same values on all processes."""
        plugin = self.plugin
        check_placement(model, self.setup.state)
        if any(p.is_meta for p in model.parameters()) or plugin.cpu_ram_efficient_loading:
            return model
        model = self.place(model)
        if plugin.sync_module_states is not False:
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.data, src=0)
        return model

    def _shard(self, model: nn.Module) -> None:
        from torch.distributed.fsdp import fully_shard

        plugin, device = self.plugin, self.setup.state.device
        units = units_of(model, plugin)
        options: dict[str, Any] = {
            "mesh": mesh_of(self.setup, plugin.hybrid),
            "reshard_after_forward": plugin.reshard_after_forward,
            "offload_policy": self._offload(),
        }
        ignored = _ignored(model, plugin.ignored_modules)
        if ignored:
            options["ignored_params"] = ignored
        whole = self._whole_state(model)
        if plugin.activation_checkpointing:
            _checkpoint_activations(units or [model])
        inner, outer = self._policies()
        for unit in units:
            fully_shard(unit, mp_policy=inner, **options)
        fully_shard(model, mp_policy=outer, **options)
        if plugin.forward_prefetch:
            for unit, following in itertools.pairwise(units):
                unit.set_modules_to_forward_prefetch([following])  # type: ignore[operator]
        if whole is not None:
            self._spread(model, whole, device)

    def _policies(self) -> tuple[Any, Any]:
        """The precision of the blocks, and of the model, whose results are float32."""
        from torch.distributed.fsdp import MixedPrecisionPolicy

        given = self.plugin.mixed_precision_policy
        if given is not None:
            return given, given
        autocast = self.setup.autocast
        if not autocast.active:
            return MixedPrecisionPolicy(), MixedPrecisionPolicy()
        dtype = autocast.dtype
        inner = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        outer = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, output_dtype=torch.float32
        )
        return inner, outer

    def _offload(self) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy

        policy = self.plugin.offload_policy
        pins = self.setup.state.device_backend.capabilities.pinned_memory
        if isinstance(policy, CPUOffloadPolicy) and not pins:
            return CPUOffloadPolicy(pin_memory=False)
        return policy

    def _whole_state(self, model: nn.Module) -> dict[str, Any] | None:
        """The main process's values, where only it has them."""
        plugin, state = self.plugin, self.setup.state
        meta = any(p.is_meta for p in model.parameters())
        if not (meta or plugin.cpu_ram_efficient_loading):
            return None
        if state.is_main_process and meta:
            _give_values(model, plugin, state.device)
        whole = dict(model.state_dict()) if state.is_main_process else {}
        if not state.is_main_process:
            model.to("meta")
        return whole

    def _spread(self, model: nn.Module, whole: dict[str, Any], device: torch.device) -> None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        offloads = bool(self.plugin.cpu_offload)
        model.to_empty(device="cpu" if offloads else device) if not (
            self.setup.state.is_main_process
        ) else model.to("cpu" if offloads else device)
        options = StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offloads
        )
        set_model_state_dict(model, whole, options=options)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Gradients stay unreduced on each process."""
        return _without_sync(self.unwrap(model))

    def state_dict(self, model: nn.Module, optimizer: Any = None, *, full: bool = True) -> Any:
        """The state under the plain model's keys, whole on the main process or in parts."""
        return get_state(self.unwrap(model), optimizer, full=full)

    def load_state_dict(
        self, model: nn.Module, state: Any, optimizer: Any = None, **kwargs: Any
    ) -> Any:
        """Take a state that is whole on each process, or in parts."""
        return set_state(self.unwrap(model), state, optimizer, **kwargs)


@contextlib.contextmanager
def _without_sync(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _ignored(model: nn.Module, given: Any) -> set[nn.Parameter]:
    if not given:
        return set()
    if isinstance(given, str):
        pattern = re.compile(given)
        given = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    return {parameter for module in given for parameter in module.parameters()}


def _checkpoint_activations(units: Sequence[nn.Module]) -> None:
    from torch.distributed._composable.checkpoint_activation import checkpoint

    for unit in units:
        checkpoint(unit)


def _give_values(
    model: nn.Module, plugin: FullyShardedDataParallelPlugin, device: torch.device
) -> None:
    """Values for weights that are on the meta device also on the main process."""
    from anydevice.errors import ModelError

    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(tensor.is_meta for tensor in own):
            continue
        if plugin.param_init_fn is not None:
            module.to_empty(device=device, recurse=False)
            plugin.param_init_fn(module)
        elif callable(reset := getattr(module, "reset_parameters", None)):
            module.to_empty(device=device, recurse=False)
            reset()
        else:
            raise ModelError(
                f"weights of {name or 'the model'!r} are on the meta device, and it has no "
                "reset_parameters. Load them on the main process, or give param_init_fn"
            )
