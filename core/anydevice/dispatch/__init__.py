"""Putting models on devices, and bringing them back."""

from anydevice.dispatch.checkpoints import load_checkpoint_and_dispatch
from anydevice.dispatch.models import dispatch_model
from anydevice.dispatch.offload import cpu_offload, cpu_offload_with_hook, disk_offload
from anydevice.dispatch.undo import (
    get_state_dict_from_offload,
    get_state_dict_offloaded_model,
    undispatch,
)
from anydevice.hooks import attach_layerwise_casting_hooks
from anydevice.init_empty import init_empty_weights, init_on_device

__all__ = [
    "attach_layerwise_casting_hooks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "get_state_dict_from_offload",
    "get_state_dict_offloaded_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "undispatch",
]
