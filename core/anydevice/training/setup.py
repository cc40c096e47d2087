"""From the arguments of an `Accelerator` to a state, an engine and choices that fit together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch

from anydevice.engines import (
    Autocast,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    Engine,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineParallelConfig,
    Setup,
    find_engine,
)
from anydevice.errors import OptionError
from anydevice.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from anydevice.training.arguments import kind_of
from anydevice.training.environment import (
    deepspeed_from_environment,
    fsdp_from_environment,
    megatron_from_environment,
    parallelism_from_environment,
)
from anydevice.training.profiling import ProfileKwargs
from anydevice.training.scaling import LossScaler
from anydevice.training.state import AcceleratorState

__all__ = ["build_engine", "read_handlers"]

_HANDLERS: Final = (
    AutocastKwargs,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}


def read_handlers(handlers: Iterable[Any] | None) -> dict[type, Any]:
    """Handlers by their class.

    Raises:
        OptionError: what is no handler, or two of one class.
    """
    found: dict[type, Any] = {}
    if isinstance(handlers, (KwargsHandler, *_HANDLERS)):
        raise OptionError(
            f"kwargs_handlers is one {kind_of(handlers)}: give a list, kwargs_handlers="
            f"[{kind_of(handlers)}(...)]"
        )
    if not isinstance(handlers, Iterable):
        handlers = () if handlers is None else (handlers,)
    for handler in handlers:
        kind = next((known for known in _HANDLERS if isinstance(handler, known)), None)
        if kind is None:
            names = ", ".join(known.__name__ for known in _HANDLERS)
            note = " (recipes for fp8 are torchao's)" if isinstance(handler, KwargsHandler) else ""
            raise OptionError(f"kwargs_handlers: {kind_of(handler)} is none of {names}{note}")
        if kind in found:
            raise OptionError(f"kwargs_handlers has two {kind.__name__}: give one")
        found[kind] = handler
    return found


def build_engine(
    state: AcceleratorState,
    options: dict[type, Any],
    *,
    device_placement: bool,
    plugins: dict[str, Any],
    engine: str | None,
) -> Engine:
    """The engine that the plugins ask for, or that several processes need.

    Raises:
        OptionError: plugins that exclude each other, or that need more processes.
    """
    fsdp = plugins["fsdp"] or fsdp_from_environment()
    parallel: ParallelismConfig | None = plugins["parallel"] or parallelism_from_environment()
    if fsdp is not None:
        options[FullyShardedDataParallelPlugin] = fsdp
    if plugins["deepspeed"] is None and (deepspeed := deepspeed_from_environment()) is not None:
        plugins = {**plugins, "deepspeed": deepspeed}
        state.deepspeed_plugin = deepspeed
    if plugins["megatron"] is None and (megatron := megatron_from_environment()) is not None:
        plugins = {**plugins, "megatron": megatron}
        state.megatron_lm_plugin = megatron
    for plugin in (plugins["deepspeed"], plugins["megatron"]):
        if plugin is not None:
            options[type(plugin)] = plugin
    mesh = None
    if parallel is not None:
        _check_mesh(parallel, fsdp)
        mesh = parallel.build_device_mesh(state.device.type)
        if parallel.pp_handler is not None:
            options[PipelineParallelConfig] = parallel.pp_handler
    name = engine or _choose(state, fsdp, parallel, plugins)
    setup = Setup(
        state=state._partial,
        autocast=_autocast(state, options.get(AutocastKwargs)),
        scaler=_scaler(state, options),
        device_placement=device_placement,
        options=options,
        mesh=mesh,
    )
    made = find_engine(name)(setup)
    if setup.scaler is not None:
        setup.scaler.in_parts = made.sharded
    state.engine_name = name
    state.device_mesh = made.setup.mesh  # an engine may have its own
    state.fsdp_plugin = fsdp
    state.parallelism_config = parallel
    return made


def _choose(
    state: AcceleratorState, fsdp: Any, parallel: ParallelismConfig | None, plugins: dict[str, Any]
) -> str:
    asked = [
        name
        for name, plugin in (
            ("fsdp2", fsdp),
            ("deepspeed", plugins["deepspeed"]),
            ("megatron_lm", plugins["megatron"]),
        )
        if plugin is not None
    ]
    if len(asked) > 1:
        raise OptionError(f"plugins of several engines were given ({', '.join(asked)}): give one")
    if parallel is not None and parallel.pp_enabled:
        if asked:
            raise OptionError(f"pp_size needs torch's own engines, not {asked[0]}")
        return "pp"
    if parallel is not None and parallel.tp_enabled:
        if asked not in ([], ["fsdp2"]):
            raise OptionError(f"tp_size needs torch's own engines, not {asked[0]}")
        return "tp"
    if asked == ["fsdp2"] and not torch.distributed.is_initialized():
        raise OptionError(
            "FullyShardedDataParallelPlugin shards over a process group, and this process was "
            "started alone. Start it with `anydevice launch` or torchrun (one process is "
            "enough), or leave the plugin out"
        )
    if asked:
        return asked[0]
    if parallel is not None and parallel.dp_shard_enabled:
        return "fsdp2"
    return "ddp" if state._partial.num_processes > 1 else "single"


def _check_mesh(parallel: ParallelismConfig, fsdp: Any) -> None:
    if parallel.pp_enabled and parallel.total_size != parallel.pp_size:
        raise OptionError(
            f"{parallel!r}: pp_size together with another size is not there. Use pp_size alone, or "
            "dp_replicate_size, dp_shard_size and tp_size"
        )
    if parallel.tp_enabled and parallel.dp_replicate_enabled and not parallel.dp_shard_enabled:
        raise OptionError(
            "tp_size with dp_replicate_size alone is not there: use dp_shard_size for the "
            "data-parallel processes, with or without dp_replicate_size"
        )
    if fsdp is not None and not parallel.dp_shard_enabled and not parallel.tp_enabled:
        raise OptionError(
            "FullyShardedDataParallelPlugin shards over dp_shard_size processes of the "
            f"ParallelismConfig, which is {parallel!r}: give dp_shard_size, or leave one out"
        )


def _autocast(state: AcceleratorState, given: AutocastKwargs | None) -> Autocast:
    return Autocast(
        state.device.type,
        _DTYPES.get(state.mixed_precision),
        **(given.to_kwargs() if given is not None else {}),
    )


def _scaler(state: AcceleratorState, options: dict[type, Any]) -> LossScaler | None:
    """Losses are scaled where models compute in float16; DeepSpeed does that itself."""
    if state.mixed_precision != "fp16" or DeepSpeedPlugin in options:
        return None
    backend = state.device_backend
    if not backend.capabilities.grad_scaling:
        raise OptionError(
            f"mixed_precision='fp16' needs a loss scaler, and the backend of {state.device.type!r} "
            "has none (capability grad_scaling). Use 'bf16' or 'no'"
        )
    given = options.get(GradScalerKwargs)
    return LossScaler(backend.new_grad_scaler(**(given.to_kwargs() if given else {})))
