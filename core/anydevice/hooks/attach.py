"""Attaching hooks to all modules of a model that need them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from anydevice.devices import CPU, Device, DeviceLike
from anydevice.hooks.align import AlignDevicesHook
from anydevice.hooks.execution_plan import ExecutionPlan
from anydevice.hooks.forward import HOOK
from anydevice.hooks.grouping import attach_groups
from anydevice.hooks.registration import add_hook_to_module
from anydevice.interrupts import uninterrupted
from anydevice.modules import own_device
from anydevice.placement import DeviceMap, find_blocks
from anydevice.placement.scripted import require_undivided
from anydevice.relocation import Relocation
from anydevice.ties import gather_weights
from anydevice.transfer import Engine
from anydevice.weights import Slot, covering_name, iter_slots, scales_weight

__all__ = [
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
]

TiedParams = dict[int, dict[torch.device, torch.Tensor]]


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: DeviceLike,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Make every submodule with weights run on a device: its weights and its inputs go there.

    Args:
        module: changed in place. Submodules that have a hook already keep it, and get no other.
        execution_device: where all run.
        skip_keys: keys of mappings that are not moved.
        preload_module_classes: classes whose modules are taken as a whole: their parts get no hook.
        tied_params_map: accepted for compatibility; ties hold without it.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import attach_execution_device_hook
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> attach_execution_device_hook(model, "cpu")
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    def attach() -> None:
        stack = [module]
        while stack:
            part = stack.pop()
            whole = type(part).__name__ in (preload_module_classes or ())
            if HOOK not in part.__dict__ and next(iter_slots(part), None) is not None:
                hook = AlignDevicesHook(
                    execution_device,
                    skip_keys=skip_keys,
                    place_submodules=whole,
                    tied_params_map=tied_params_map,
                )
                add_hook_to_module(part, hook)
            if not whole:
                stack += reversed(list(part.children()))

    uninterrupted(attach)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: DeviceLike | None = None,
    offload: bool = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Make a module and its parts run on a device, their weights offloaded or not.

    Offloaded weights move in groups, not one by one: `anydevice.hooks.grouping`.

    Args:
        module: changed in place.
        execution_device: where it runs; the device of its first weight by default.
        offload: whether the weights are stored on the host outside of forwards.
        weights_map: full names to host tensors that the offloaded weights are set to.
        offload_buffers: whether buffers are stored on the host too.
        module_name: the module's full name, which begins the names in ``weights_map``.
        skip_keys: keys of mappings that are not moved.
        preload_module_classes: classes whose modules are loaded as a whole before their forward.
        tied_params_map: accepted for compatibility; ties hold without it.

    Raises:
        ModelError: a weight is on meta and has no value.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import attach_align_device_hook
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> attach_align_device_hook(model, "cpu", offload=True)
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    attach_align_device_hook_on_blocks(
        module,
        execution_device,
        offload,
        weights_map,
        offload_buffers,
        module_name,
        skip_keys,
        preload_module_classes,
        tied_params_map,
    )


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: DeviceLike | Mapping[str, DeviceLike] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, torch.Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Make the blocks of a model run each on its device, their weights offloaded or not.

    Args:
        module: changed in place.
        execution_device: one device, or full names of blocks to devices.
        offload: one answer, or full names of blocks to answers.
        weights_map: full names to host tensors that the offloaded weights are set to.
        offload_buffers: whether buffers of offloaded blocks are stored on the host too.
        module_name: the module's full name.
        skip_keys: keys of mappings that are not moved.
        preload_module_classes: classes whose modules are loaded as a whole before their forward.
        tied_params_map: accepted for compatibility; ties hold without it.

    Raises:
        DeviceMapError: weights of the module belong to none of the blocks named.
        ModelError: a weight is on meta and has no value.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import attach_align_device_hook_on_blocks
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> attach_align_device_hook_on_blocks(model, {"0": "cpu", "1": "cpu"})
        >>> model(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """
    if execution_device is None:
        execution_device = own_device(module)
    if not isinstance(execution_device, Mapping):
        execution_device = dict.fromkeys(
            offload if isinstance(offload, Mapping) else [module_name], execution_device
        )
    places = DeviceMap(execution_device)
    offloads = offload if isinstance(offload, Mapping) else dict.fromkeys(execution_device, offload)

    def stored(name: str, slot: Slot) -> Device:
        is_offloaded = bool(_nearest(offloads, name)) and (
            offload_buffers or not slot.is_buffer or scales_weight(slot)
        )
        return CPU if is_offloaded else places.lookup(name)

    buffers = [
        name
        for name, slot in iter_slots(module)
        if slot.is_buffer and not offload_buffers and _nearest(offloads, _join(module_name, name))
    ]
    plan = ExecutionPlan(
        execution=_Execution(places),
        main=places.main_device,
        blocks=[_join(module_name, name) for name in find_blocks(module)],
        preload=preload_module_classes or (),
        skip_keys=skip_keys,
        io_same_device=module_name == "",
        prefix=module_name,
        resident_buffers=buffers,
    )

    def attach() -> None:
        require_undivided(module, plan.execution, module_name)
        relocation = Relocation()
        for weight in gather_weights(iter_slots(module, module_name), stored):
            named = (n for n in weight.names if weights_map is not None and n in weights_map)
            name = next(named, None) if weight.device == CPU else None
            relocation.add(weight, weights_map[name] if weights_map and name is not None else None)
        relocation.commit()
        attach_groups(module, plan, Engine())

    uninterrupted(attach)


@dataclasses.dataclass(frozen=True)
class _Execution:
    """Where the modules of a device map run; an object, so that it can be pickled."""

    places: DeviceMap

    def __call__(self, name: str) -> Device | None:
        key = self.places.key_of(name)
        return None if key is None else self.places.lookup(key)


def _nearest(answers: Mapping[str, Any], name: str) -> Any:
    """The answer for a name: that of its longest prefix."""
    key = covering_name(name, answers)
    return False if key is None else answers[key]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name
