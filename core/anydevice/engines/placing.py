"""Where a model is before it is prepared, and whether it can be trained from there."""

from __future__ import annotations

import torch
from torch import nn

from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import ModelError
from anydevice.processes import PartialState

__all__ = ["check_placement", "place_optimizer", "placed_on"]


def placed_on(model: nn.Module) -> dict[str, str]:
    """The device map of a dispatched model, as text; empty for any other."""
    found = getattr(model, "hf_device_map", None) or {}
    return {name: str(device) for name, device in dict(found).items()}


def check_placement(model: nn.Module, state: PartialState) -> bool:
    """Whether the model is dispatched.

    Raises:
        ModelError: it is dispatched in a way that cannot be trained, or among several processes.
    """
    places = placed_on(model)
    if len(set(places.values())) < 2 and not ({"cpu", "disk"} & set(places.values())):
        return False
    if state.num_processes > 1:
        raise ModelError(
            f"the model is dispatched ({_show(places)}), which one process does, and there are "
            f"{state.num_processes}. Train it in one process; or load it whole on each process, "
            "without a device_map; or shard it over the processes: "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())"
        )
    fixed = _trained_on_disk(model, places)
    if fixed:
        raise ModelError(
            f"{', '.join(map(repr, fixed[:3]))} rest on the disk, where an "
            "optimizer cannot change them. Freeze them (requires_grad_(False)), as for adapters; "
            'or dispatch without "disk"'
        )
    return True


def _trained_on_disk(model: nn.Module, places: dict[str, str]) -> list[str]:
    """Names of trainable weights in files; adapters next to frozen ones there are in memory."""
    # The dispatched model may stand in another one, such as peft's.
    owner = next((m for m in model.modules() if "hf_device_map" in vars(m)), model)
    return [
        name
        for name, parameter in owner.named_parameters()
        if parameter.requires_grad
        and _place_of(name, places) == "disk"
        and backing_of(parameter) is not None
    ]


def _place_of(name: str, places: dict[str, str]) -> str | None:
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places.get(name)


def place_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Put state that an optimizer has already next to its parameters."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
                state[key] = value.to(parameter.device)


def _show(places: dict[str, str]) -> str:
    devices = sorted(set(places.values()))
    return ", ".join(devices)
