"""Engines: how models and optimizers become those of several processes. See `Engine`."""

from anydevice.engines.base import Engine, OwnFiles, Setup, clip_grad_norm
from anydevice.engines.ddp_options import DistributedDataParallelKwargs
from anydevice.engines.deepspeed_config import DummyOptim, DummyScheduler, HfDeepSpeedConfig
from anydevice.engines.deepspeed_options import DeepSpeedPlugin
from anydevice.engines.finding import ENGINE_GROUP, find_engine, list_engines
from anydevice.engines.fsdp_options import FullyShardedDataParallelPlugin
from anydevice.engines.megatron.options import MegatronLMPlugin
from anydevice.engines.meshes import (
    ParallelismConfig,
    PipelineParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from anydevice.engines.precise import Autocast, MixedPrecision
from anydevice.engines.wrapping import units_of

__all__ = [
    "ENGINE_GROUP",
    "Autocast",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DummyOptim",
    "DummyScheduler",
    "Engine",
    "FullyShardedDataParallelPlugin",
    "HfDeepSpeedConfig",
    "MegatronLMPlugin",
    "MixedPrecision",
    "OwnFiles",
    "ParallelismConfig",
    "PipelineParallelConfig",
    "Setup",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "clip_grad_norm",
    "find_engine",
    "list_engines",
    "units_of",
]
