"""Run PyTorch models that do not fit on one device, on any accelerator.

The names below are imported when they are first asked for, so that ``import anydevice`` is light,
and starts no device's runtime.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from anydevice._version import __version__

if TYPE_CHECKING:
    from anydevice import (
        backend as backend,
    )
    from anydevice import (
        big_modeling as big_modeling,
    )
    from anydevice import (
        checkpoint as checkpoint,
    )
    from anydevice import (
        collectives as collectives,
    )
    from anydevice import (
        data as data,
    )
    from anydevice import (
        devices as devices,
    )
    from anydevice import (
        dispatch as dispatch,
    )
    from anydevice import (
        distributed as distributed,
    )
    from anydevice import (
        engines as engines,
    )
    from anydevice import (
        errors as errors,
    )
    from anydevice import (
        hooks as hooks,
    )
    from anydevice import (
        integrations as integrations,
    )
    from anydevice import (
        loading as loading,
    )
    from anydevice import (
        offload_store as offload_store,
    )
    from anydevice import (
        placement as placement,
    )
    from anydevice import (
        pretrained as pretrained,
    )
    from anydevice import (
        processes as processes,
    )
    from anydevice import (
        registry as registry,
    )
    from anydevice import (
        state as state,
    )
    from anydevice import (
        tensors as tensors,
    )
    from anydevice import (
        training as training,
    )
    from anydevice import (
        transfer as transfer,
    )
    from anydevice import (
        utils as utils,
    )
    from anydevice.backend import Capabilities, DeviceBackend, MemoryInfo
    from anydevice.data import (
        DataLoaderConfiguration,
        prepare_data_loader,
        skip_first_batches,
    )
    from anydevice.dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        undispatch,
    )
    from anydevice.engines import (
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        MegatronLMPlugin,
        ParallelismConfig,
    )
    from anydevice.errors import AnyDeviceError
    from anydevice.handlers import (
        AutocastKwargs,
        GradScalerKwargs,
        InitProcessGroupKwargs,
    )
    from anydevice.loading import load_checkpoint_in_model
    from anydevice.logging import get_logger
    from anydevice.memory import find_executable_batch_size
    from anydevice.placement import Placement, infer_auto_device_map
    from anydevice.pretrained import from_pretrained
    from anydevice.processes import DDPCommunicationHookType, DistributedType, PartialState
    from anydevice.randomness import synchronize_rng_states
    from anydevice.registry import available_devices, get_backend, list_backends
    from anydevice.training import (
        Accelerator,
        AcceleratorState,
        GradientAccumulationPlugin,
        GradientState,
        ProfileKwargs,
        ProjectConfiguration,
        TorchDynamoPlugin,
    )
    from anydevice.training.launchers import (
        debug_launcher,
        notebook_launcher,
    )
    from anydevice.training.local_sgd import (
        LocalSGD,
    )
    from anydevice.transfer import profile_transfers

#: Where each public name is defined.
_HOMES = {
    "MegatronLMPlugin": "engines",
    "DeepSpeedPlugin": "engines",
    "Accelerator": "training",
    "AcceleratorState": "training",
    "AnyDeviceError": "errors",
    "AutocastKwargs": "handlers",
    "Capabilities": "backend",
    "DDPCommunicationHookType": "processes",
    "DataLoaderConfiguration": "data",
    "DeviceBackend": "backend",
    "DistributedDataParallelKwargs": "engines",
    "DistributedType": "processes",
    "FullyShardedDataParallelPlugin": "engines",
    "GradScalerKwargs": "handlers",
    "GradientAccumulationPlugin": "training",
    "GradientState": "training",
    "InitProcessGroupKwargs": "handlers",
    "LocalSGD": "training.local_sgd",
    "MemoryInfo": "backend",
    "ParallelismConfig": "engines",
    "PartialState": "processes",
    "Placement": "placement",
    "ProfileKwargs": "training",
    "ProjectConfiguration": "training",
    "TorchDynamoPlugin": "training",
    "available_devices": "registry",
    "cpu_offload": "dispatch",
    "cpu_offload_with_hook": "dispatch",
    "debug_launcher": "training.launchers",
    "disk_offload": "dispatch",
    "dispatch_model": "dispatch",
    "find_executable_batch_size": "memory",
    "from_pretrained": "pretrained",
    "get_backend": "registry",
    "get_logger": "logging",
    "infer_auto_device_map": "placement",
    "init_empty_weights": "init_empty",
    "init_on_device": "init_empty",
    "list_backends": "registry",
    "load_checkpoint_and_dispatch": "dispatch",
    "load_checkpoint_in_model": "loading",
    "notebook_launcher": "training.launchers",
    "prepare_data_loader": "data",
    "profile_transfers": "transfer",
    "skip_first_batches": "data",
    "synchronize_rng_states": "randomness",
    "undispatch": "dispatch",
}

__all__ = [
    "Accelerator",
    "AcceleratorState",
    "AnyDeviceError",
    "AutocastKwargs",
    "Capabilities",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DeviceBackend",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "MegatronLMPlugin",
    "MemoryInfo",
    "ParallelismConfig",
    "PartialState",
    "Placement",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "__version__",
    "available_devices",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "from_pretrained",
    "get_backend",
    "get_logger",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "list_backends",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "notebook_launcher",
    "prepare_data_loader",
    "profile_transfers",
    "skip_first_batches",
    "synchronize_rng_states",
    "undispatch",
]


#: Submodules that may be asked for as attributes without an import of their own.
_SUBMODULES = frozenset(
    {
        "backend",
        "big_modeling",
        "checkpoint",
        "collectives",
        "data",
        "devices",
        "dispatch",
        "distributed",
        "engines",
        "errors",
        "hooks",
        "integrations",
        "loading",
        "offload_store",
        "placement",
        "pretrained",
        "processes",
        "registry",
        "state",
        "tensors",
        "training",
        "transfer",
        "utils",
    }
)


if not TYPE_CHECKING:  # a type checker reads the imports above, and so knows a misspelled name

    def __getattr__(name: str) -> Any:
        if name in _SUBMODULES:
            return importlib.import_module(f"anydevice.{name}")
        home = _HOMES.get(name)
        if home is None:
            # With these, Python adds "Did you mean".
            raise AttributeError(
                f"module 'anydevice' has no attribute {name!r}",
                name=name,
                obj=sys.modules[__name__],
            )
        value = getattr(importlib.import_module(f"anydevice.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("ANYDEVICE_TRANSFORMERS") or os.environ.get("ANYDEVICE_DIFFUSERS"):
    importlib.import_module("anydevice.integrations").enable_from_environment()
