"""Hooks: code around a module's forward that has its inputs and weights where it runs."""

from anydevice.hooks.align import AlignDevicesHook
from anydevice.hooks.attach import (
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
)
from anydevice.hooks.base import ModelHook, SequentialHook
from anydevice.hooks.casting import LayerwiseCastingHook, attach_layerwise_casting_hooks
from anydevice.hooks.cpu_offload import CpuOffload, UserCpuOffloadHook
from anydevice.hooks.registration import (
    add_hook_to_module,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from anydevice.hooks.state import align_module_device, has_offloaded_params

__all__ = [
    "AlignDevicesHook",
    "CpuOffload",
    "LayerwiseCastingHook",
    "ModelHook",
    "SequentialHook",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "has_offloaded_params",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
]
