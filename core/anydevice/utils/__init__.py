"""The reference's import path for utilities. No logic here.

``is_foo_available`` and ``install_foo`` are there for any ``foo``, and names that have no meaning
here refuse when they are called: see `__getattr__`.
"""

from typing import Any

from anydevice.collectives import (
    CannotPadNestedTensorWarning,
    broadcast,
    broadcast_object_list,
    find_batch_size,
    gather,
    gather_object,
    is_namedtuple,
    pad_across_processes,
    pad_input_tensors,
    reduce,
    slice_tensors,
)
from anydevice.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    PROFILE_PATTERN_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME,
)
from anydevice.data import (
    DataLoaderConfiguration,
)
from anydevice.dispatch import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    undispatch,
)
from anydevice.dtypes import CustomDtype, dtype_byte_size
from anydevice.engines import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DummyOptim,
    DummyScheduler,
    FullyShardedDataParallelPlugin,
    HfDeepSpeedConfig,
    MegatronLMPlugin,
    ParallelismConfig,
    PipelineParallelConfig,
    TorchTensorParallelConfig,
    TorchTensorParallelPlugin,
)
from anydevice.environment import (
    availability as _availability,
)
from anydevice.environment import (
    check_os_kernel,
    clear_environment,
    compare_versions,
    convert_dict_to_env_variables,
    get_int_from_env,
    is_bf16_available,
    is_fp16_available,
    is_torch_version,
    override_numa_affinity,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    set_numa_affinity,
    str_to_bool,
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
from anydevice.inspecting import (
    get_module_class_from_name,
    get_parameters_from_modules,
    has_compiled_regions,
    is_peft_model,
    model_has_dtensor,
)
from anydevice.launch.questions import (
    write_basic_config,
)
from anydevice.loading import (
    load_checkpoint_in_model,
    load_state_dict,
)
from anydevice.memory import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
)
from anydevice.modules import (
    extract_model_from_parallel,
    get_module_children_bottom_up,
    get_non_persistent_buffers,
    is_compiled_module,
    named_module_tensors,
    set_module_tensor_to_device,
)
from anydevice.nested import concatenate, find_device, is_torch_tensor, listify, recursively_apply
from anydevice.offload_store import (
    OffloadedWeightsLoader,
    extract_submodules_state_dict,
    load_offloaded_weight,
    load_offloaded_weights,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from anydevice.placement import (
    check_device_map,
    clean_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from anydevice.precision import (
    ConvertOutputsToFp32,
    convert_outputs_to_fp32,
    convert_to_fp32,
    get_grad_scaler,
)
from anydevice.processes import (
    ComputeEnvironment,
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
    SageMakerDistributedType,
    tqdm,
    wait_for_everyone,
)
from anydevice.quantization import (
    BnbQuantizationConfig,
    load_and_quantize_model,
)
from anydevice.quantization import (
    installer as _installer,
)
from anydevice.randomness import (
    set_seed,
    synchronize_rng_state,
    synchronize_rng_states,
)
from anydevice.refusals import (
    refused as _refused,
)
from anydevice.saving import (
    clean_state_dict_for_safetensors,
    load,
    save,
)
from anydevice.sizes import (
    calculate_maximum_sizes,
    compute_module_sizes,
    compute_module_total_buffer_size,
    get_max_layer_size,
    get_module_size_with_ties,
)
from anydevice.tensors import send_to_device
from anydevice.text import parse_bytes as convert_file_size_to_int
from anydevice.ties import (
    check_tied_parameters_on_same_device,
    find_tied_parameters,
    retie_parameters,
)
from anydevice.training import (
    DeepSpeedSchedulerWrapper,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from anydevice.training.autocasting import (
    get_mixed_precision_context_manager,
)
from anydevice.training.checkpoints.fsdp_files import (
    load_fsdp_model,
    load_fsdp_optimizer,
    save_fsdp_model,
    save_fsdp_optimizer,
)

__all__ = [
    "MODEL_NAME", "OPTIMIZER_NAME", "PROFILE_PATTERN_NAME", "RNG_STATE_NAME", "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME", "SAFE_WEIGHTS_NAME", "SAFE_WEIGHTS_PATTERN_NAME", "SAMPLER_NAME",
    "SCALER_NAME", "SCHEDULER_NAME", "WEIGHTS_INDEX_NAME", "WEIGHTS_NAME",
    "WEIGHTS_PATTERN_NAME", "AutocastKwargs", "BnbQuantizationConfig",
    "CannotPadNestedTensorWarning", "ComputeEnvironment", "ConvertOutputsToFp32", "CustomDtype",
    "DDPCommunicationHookType", "DataLoaderConfiguration", "DeepSpeedPlugin",
    "DeepSpeedSchedulerWrapper", "DistributedDataParallelKwargs", "DistributedType",
    "DummyOptim", "DummyScheduler", "DynamoBackend", "FullyShardedDataParallelPlugin",
    "GradScalerKwargs", "GradientAccumulationPlugin", "HfDeepSpeedConfig",
    "InitProcessGroupKwargs", "KwargsHandler", "LoggerType", "MegatronLMPlugin",
    "OffloadedWeightsLoader", "ParallelismConfig", "PipelineParallelConfig", "PrecisionType",
    "ProfileKwargs", "ProjectConfiguration", "RNGType", "SageMakerDistributedType",
    "TorchDynamoPlugin", "TorchTensorParallelConfig", "TorchTensorParallelPlugin",
    "align_module_device", "broadcast", "broadcast_object_list", "calculate_maximum_sizes",
    "check_device_map", "check_os_kernel", "check_tied_parameters_on_same_device",
    "clean_device_map", "clean_state_dict_for_safetensors", "clear_device_cache",
    "clear_environment", "compare_versions", "compute_module_sizes",
    "compute_module_total_buffer_size", "concatenate", "convert_dict_to_env_variables",
    "convert_file_size_to_int", "convert_outputs_to_fp32", "convert_to_fp32", "dtype_byte_size",
    "extract_model_from_parallel", "extract_submodules_state_dict", "find_batch_size",
    "find_device", "find_executable_batch_size", "find_tied_parameters", "gather",
    "gather_object", "get_balanced_memory", "get_grad_scaler", "get_int_from_env",
    "get_max_layer_size", "get_max_memory", "get_mixed_precision_context_manager",
    "get_module_children_bottom_up", "get_module_class_from_name", "get_module_size_with_ties",
    "get_non_persistent_buffers", "get_parameters_from_modules", "get_state_dict_from_offload",
    "get_state_dict_offloaded_model", "has_compiled_regions", "has_offloaded_params",
    "infer_auto_device_map", "is_bf16_available", "is_compiled_module", "is_fp16_available",
    "is_namedtuple", "is_peft_model", "is_torch_tensor", "is_torch_version", "listify", "load",
    "load_and_quantize_model", "load_checkpoint_in_model", "load_fsdp_model",
    "load_fsdp_optimizer", "load_offloaded_weight", "load_offloaded_weights", "load_state_dict",
    "model_has_dtensor", "named_module_tensors", "offload_state_dict", "offload_weight",
    "override_numa_affinity", "pad_across_processes", "pad_input_tensors",
    "parse_choice_from_env", "parse_flag_from_env", "patch_environment",
    "purge_accelerate_environment", "recursively_apply", "reduce", "release_memory",
    "retie_parameters", "save", "save_fsdp_model", "save_fsdp_optimizer", "save_offload_index",
    "send_to_device", "set_module_tensor_to_device", "set_numa_affinity", "set_seed",
    "should_reduce_batch_size", "slice_tensors", "str_to_bool", "synchronize_rng_state",
    "synchronize_rng_states", "tqdm", "undispatch", "wait_for_everyone", "write_basic_config",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    found = _availability(name)
    if found is None and name.startswith("install_"):
        found = _installer(name)
    if found is None:
        found = _refused(name)
    if found is None:
        raise AttributeError(f"module 'anydevice.utils' has no attribute {name!r}")
    return found
