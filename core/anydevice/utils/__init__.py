"""The reference's import path for utilities. No logic here."""

from anydevice.data import (
    DataLoaderConfiguration,
)
from anydevice.dispatch import (
    get_state_dict_offloaded_model,
    undispatch,
)
from anydevice.engines import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from anydevice.handlers import (
    AutocastKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
)
from anydevice.hooks import (
    align_module_device,
    has_offloaded_params,
)
from anydevice.launch.questions import write_basic_config
from anydevice.loading import load_checkpoint_in_model, load_state_dict
from anydevice.modules import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    set_module_tensor_to_device,
)
from anydevice.offload_store import (
    OffloadedWeightsLoader,
    load_offloaded_weights,
    offload_state_dict,
)
from anydevice.placement import (
    check_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from anydevice.sizes import calculate_maximum_sizes, compute_module_sizes, get_max_layer_size
from anydevice.tensors import (
    concatenate,
    find_device,
    is_torch_tensor,
    listify,
    recursively_apply,
    send_to_device,
)
from anydevice.ties import find_tied_parameters, retie_parameters
from anydevice.training import (
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "OffloadedWeightsLoader",
    "ParallelismConfig",
    "ProfileKwargs",
    "ProjectConfiguration",
    "TorchDynamoPlugin",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "align_module_device",
    "calculate_maximum_sizes",
    "check_device_map",
    "compute_module_sizes",
    "concatenate",
    "extract_model_from_parallel",
    "find_device",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "get_module_children_bottom_up",
    "get_state_dict_offloaded_model",
    "has_offloaded_params",
    "infer_auto_device_map",
    "is_torch_tensor",
    "listify",
    "load_checkpoint_in_model",
    "load_offloaded_weights",
    "load_state_dict",
    "offload_state_dict",
    "recursively_apply",
    "retie_parameters",
    "send_to_device",
    "set_module_tensor_to_device",
    "undispatch",
    "write_basic_config",
]
