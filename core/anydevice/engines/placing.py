"""Where a model is before it is prepared, and whether it can be trained from there."""

from __future__ import annotations

import torch
from torch import nn

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
    disk = [name for name, device in places.items() if device == "disk"]
    if disk and any(p.requires_grad for p in model.parameters()):
        raise ModelError(
            f"weights of {', '.join(repr(n) for n in disk[:3])} rest on the disk, where an "
            "optimizer cannot change them. Freeze them (requires_grad_(False)), as for adapters; "
            'or dispatch without "disk"'
        )
    return True


def place_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Put state that an optimizer has already beside its parameters."""
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.device != parameter.device:
                state[key] = value.to(parameter.device)


def _show(places: dict[str, str]) -> str:
    devices = sorted(set(places.values()))
    return ", ".join(devices)
