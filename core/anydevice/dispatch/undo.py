"""From a dispatched model back to an ordinary one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydevice import registry
from anydevice.checkpoint.mapped import backing_of
from anydevice.devices import CPU, Device, DeviceLike, resolve_device
from anydevice.dispatch.models import ENGINE
from anydevice.dispatch.storing import check_memory, explain_lack
from anydevice.errors import DeviceMapError, DoesNotFitError
from anydevice.hooks import remove_hook_from_submodules
from anydevice.interrupts import uninterrupted
from anydevice.relocation import Relocation
from anydevice.sizes import tensor_bytes
from anydevice.tensors import move_tensor
from anydevice.text import format_bytes
from anydevice.ties import gather_weights
from anydevice.weights import iter_slots, require_module

__all__ = ["get_state_dict_from_offload", "get_state_dict_offloaded_model", "undispatch"]

#: What `dispatch_model` sets on a model.
_MARKS = ("hf_device_map", "anydevice_placement")


@torch.inference_mode(False)
def undispatch(model: nn.Module, device: DeviceLike = "cpu") -> nn.Module:
    """Move a dispatched model to one device, as an ordinary model without hooks.

    Weights on disk are read into memory. Parameters stay the same objects.

    Args:
        model: changed in place; one that was never dispatched is just moved.
        device: any spelling of one device.

    Returns:
        The model.

    Raises:
        DoesNotFitError: the device lacks memory for it; nothing has changed then.
        UnknownDeviceError: the device is not here.
        DeviceMapError: the device is the disk, or meta.
        ModelError: a weight is on meta.

    Example:
        >>> from torch import nn
        >>> from anydevice import cpu_offload, undispatch
        >>> model = cpu_offload(nn.Linear(4, 2), "cpu")
        >>> undispatch(model).weight.device.type
        'cpu'
    """
    require_module(model)
    place = resolve_device(device)
    if not (place.is_accelerator or place == CPU):
        raise DeviceMapError(f"a model cannot run on {place}: name the host or an accelerator")
    uninterrupted(lambda: _bring_back(model, place))
    return model


def _bring_back(model: nn.Module, place: Device) -> None:
    weights = gather_weights(iter_slots(model), lambda _name, _slot: place)
    check_memory(weights)
    coming = [w for w in weights if place == CPU and not w.tensor.is_meta]
    coming = [w for w in coming if not w.is_there or backing_of(w.tensor) is not None]
    needed = sum(tensor_bytes(w.tensor) for w in coming)
    free = registry.measure_memory(CPU.type).free
    if needed > free:
        raise DoesNotFitError(
            f"the model needs {format_bytes(needed)} of memory that it does not have yet, and "
            f"{format_bytes(free)} are free. Leave it dispatched, or use "
            "remove_hook_from_submodules, which leaves weights on disk as views of their files."
        )
    relocation = Relocation()
    for weight in weights:
        mapped = place == CPU and backing_of(weight.tensor) is not None
        with explain_lack(weight):
            relocation.add(weight, weight.tensor.detach().clone() if mapped else None)
    remove_hook_from_submodules(model)
    engine = model.__dict__.pop(ENGINE, None)
    if engine is not None:
        engine.close()
    for mark in _MARKS:
        model.__dict__.pop(mark, None)
    relocation.commit()


def get_state_dict_offloaded_model(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a dispatched model's state dict, all of it on the host.

    Weights on disk are views of their files. ``model.state_dict()`` is as complete; it gives each
    weight where it is stored.

    Args:
        model: dispatched or not.

    Example:
        >>> from torch import nn
        >>> from anydevice import cpu_offload
        >>> from anydevice.utils import get_state_dict_offloaded_model
        >>> model = cpu_offload(nn.Linear(2, 2), "cpu")
        >>> sorted(get_state_dict_offloaded_model(model))
        ['bias', 'weight']
    """
    state = model.state_dict()
    return {
        name: move_tensor(value, CPU) if isinstance(value, torch.Tensor) else value
        for name, value in state.items()
    }


def get_state_dict_from_offload(
    module: nn.Module,
    module_name: str,
    state_dict: dict[str, Any],
    device_to_put_offload: DeviceLike = "cpu",
) -> dict[str, Any]:
    """Put the values of one module's own weights into a state dict, under their full names.

    Args:
        module: dispatched or not.
        module_name: the full name of one of its weights, such as ``"layers.0.weight"``.
        state_dict: is changed, and returned; only the names that it has are filled.
        device_to_put_offload: where the values go.

    Example:
        >>> from torch import nn
        >>> from anydevice import cpu_offload
        >>> from anydevice.utils.modeling import get_state_dict_from_offload
        >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 2)), "cpu")
        >>> state = get_state_dict_from_offload(model[0], "0.weight", {"0.weight": ""})
        >>> state["0.weight"].shape
        torch.Size([2, 2])
    """
    place = resolve_device(device_to_put_offload)
    prefix = module_name.rpartition(".")[0]
    for name, value in module.state_dict().items():
        full = f"{prefix}.{name}" if prefix else name
        if full in state_dict:
            state_dict[full] = move_tensor(value, place)
    return state_dict
