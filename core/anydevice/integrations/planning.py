"""From transformers' ``device_map`` arguments to a placement."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import torch

from anydevice.devices import DISK, resolve_device
from anydevice.dtypes import DtypeLike
from anydevice.errors import DeviceMapError, ModelError
from anydevice.placement import (
    STRATEGIES,
    Placement,
    PlacementOptions,
    check_form,
    get_max_memory,
    place_model,
)
from anydevice.pretrained.quantized import method_of

__all__ = ["Planned", "plan", "planned_for", "read_device_map"]

#: Methods whose weights are no plain tensors, and so cannot be stored on the disk.
_KEPT_IN_MEMORY: Final = frozenset({"torchao"})
#: The attribute of a model, while it is loaded, that holds its `Planned`.
_PLANNED: Final = "_anydevice_planned"


@dataclasses.dataclass(frozen=True)
class Planned:
    """What was decided for a model before its weights are read."""

    placement: Placement
    quantizer: Any


def read_device_map(device_map: Any) -> str | dict[str, Any]:
    """A strategy or a dict, from any form of device map.

    Raises:
        DeviceMapError, UnknownDeviceError: it cannot be read, or a device is not on this machine.
    """
    check_form(device_map)
    if isinstance(device_map, str) and device_map in STRATEGIES:
        return device_map
    given = dict(device_map) if isinstance(device_map, Mapping) else {"": device_map}
    for name, device in given.items():
        readable = _torch_name(device)
        if not isinstance(device, (str, int)):
            given[name] = readable
    return given


def plan(model: Any, device_map: Any, max_memory: Any = None, quantizer: Any = None) -> Any:
    """Plan where a model's weights go, by what they take once loaded.

    Args:
        model: a transformers model, on meta.
        device_map: see `anydevice.dispatch_model`.
        max_memory: budgets.
        quantizer: the model's, of transformers; None for none.

    Returns:
        Names of modules to devices, spelled as torch reads them, or ``"disk"``.

    Raises:
        DeviceMapError, UnknownDeviceError, BudgetError, DoesNotFitError, ModelError: see
            `anydevice.infer_auto_device_map`.
    """
    if quantizer is not None and device_map in STRATEGIES:
        max_memory = quantizer.adjust_max_memory(get_max_memory(max_memory))
        max_memory = {device: int(size) for device, size in max_memory.items()}
    stored = method_of(quantizer) not in _KEPT_IN_MEMORY
    options = PlacementOptions(
        max_memory, special_dtypes=_dtypes_once_loaded(model, quantizer), disk=stored
    )
    placement = place_model(model, device_map, options).placement
    if not stored and DISK in placement.devices.devices:
        raise DeviceMapError(
            f"device_map places modules on the disk, where weights that {method_of(quantizer)} "
            "quantizes cannot be stored: place them on the host or an accelerator"
        )
    model.__dict__[_PLANNED] = Planned(placement, quantizer)
    model.anydevice_placement = placement
    return _by_name(model, placement)


def _by_name(model: Any, placement: Placement) -> dict[str, str]:
    """The map for transformers' loader, which compares tied weights: they go to one device."""
    found = {name: _torch_name(device) for name, device in placement.items()}
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        found[source] = found[target] = _torch_name(str(placement.devices.lookup(source)))
    return found


def planned_for(model: Any) -> Planned:
    """What `plan` decided for a model.

    Raises:
        ModelError: it was not planned by it.
    """
    planned = model.__dict__.get(_PLANNED)
    if not isinstance(planned, Planned):
        raise ModelError(f"{type(model).__name__} was not planned by anydevice: load it again")
    return planned


def _torch_name(device: Any) -> str:
    found = resolve_device(device)
    return "disk" if found == DISK else str(found.torch)


def _dtypes_once_loaded(model: Any, quantizer: Any) -> dict[str, DtypeLike]:
    """The dtypes of weights that are not loaded in the dtype that the empty model has."""
    special: dict[str, DtypeLike] = {}
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in model.state_dict().items():
        if quantizer is not None:
            bits = round(8 * quantizer.param_element_size(model, name, tensor))
            if bits != 8 * tensor.element_size():
                special[name] = f"int{bits}"
        elif tensor.is_floating_point() and kept.intersection(name.split(".")):
            special[name] = torch.float32
    return special
