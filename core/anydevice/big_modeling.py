"""The reference's import path for the functions that put models on devices. No logic here."""

from anydevice.dispatch import (
    attach_layerwise_casting_hooks,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    undispatch,
)
from anydevice.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    remove_hook_from_submodules,
)
from anydevice.loading import load_checkpoint_in_model
from anydevice.offload_store import OffloadedWeightsLoader, offload_state_dict
from anydevice.placement import check_device_map, get_balanced_memory, infer_auto_device_map
from anydevice.ties import find_tied_parameters, retie_parameters

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "OffloadedWeightsLoader",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_layerwise_casting_hooks",
    "check_device_map",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "find_tied_parameters",
    "get_balanced_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "offload_state_dict",
    "remove_hook_from_submodules",
    "retie_parameters",
    "undispatch",
]
