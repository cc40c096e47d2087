"""The states of all random generators of a process, as plain data that is safe to load."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from anydevice.processes import PartialState

__all__ = ["random_states", "set_random_states"]


def random_states(state: PartialState) -> dict[str, Any]:
    """Python's, numpy's, torch's and the device's."""
    states: dict[str, Any] = {
        "random_state": random.getstate(),
        "torch_manual_seed": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy_random_seed"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    device = state.device
    if device.index is not None and state.device_backend.capabilities.device_rng:
        states["device"] = state.device_backend.rng_state(device.index).cpu()
    return states


def set_random_states(states: dict[str, Any], state: PartialState) -> None:
    """Go back to such states; those of another kind of device are left out."""
    if (python := states.get("random_state")) is not None:
        version, numbers, following = python
        random.setstate((version, tuple(numbers), following))
    if (host := states.get("torch_manual_seed")) is not None:
        torch.set_rng_state(host.cpu())
    if (drawn := states.get("numpy_random_seed")) is not None:
        import numpy

        name, keys, *rest = drawn
        numpy.random.set_state((name, numpy.asarray(keys, dtype="uint32"), *rest))
    device = state.device
    if device.index is not None and state.device_backend.capabilities.device_rng:
        own = states.get("device", states.get(f"torch_{device.type}_manual_seed"))
        if isinstance(own, torch.Tensor):
            state.device_backend.set_rng_state(own, device.index)
