"""State of optimizers follows the parameters that were moved.

An optimizer that was made before its model was dispatched, and not named there, has state on
devices where its parameters are not any more. Its next step would fail. So each optimizer looks,
before a step, whether any of its parameters have been moved since its last one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from anydevice.devices import parse_device
from anydevice.tensors import move_tensor

__all__ = ["move_optimizer_state", "note_moved"]


class _Moved:
    """Parameters that anydevice has moved, and optimizers that have looked since."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.parameters: Any = WeakIdKeyDictionary()
        self.times = 0
        self.seen: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self.handle: Any = None


_moved: Final = _Moved()


def note_moved(parameters: Iterable[torch.Tensor]) -> None:
    """Let the optimizers of some parameters move their state before their next step.

    Args:
        parameters: that have just been moved to other devices.
    """
    with _moved.lock:
        for parameter in parameters:
            _moved.parameters[parameter] = True
        _moved.times += 1
        if _moved.handle is None:
            _moved.handle = register_optimizer_step_pre_hook(_follow)


def move_optimizer_state(optimizer: torch.optim.Optimizer, *, all_parameters: bool = True) -> None:
    """Move the state of each parameter to the device that the parameter is stored on.

    Args:
        optimizer: changed in place.
        all_parameters: whether also of those that anydevice has not moved.
    """
    for group in optimizer.param_groups:
        keeps_step = not (group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            if not all_parameters and parameter not in _moved.parameters:
                continue
            state = optimizer.state.get(parameter, {})
            device = parse_device(parameter.device)
            for name, value in state.items():
                # Counters of steps are on the host, unless the optimizer needs them elsewhere.
                if isinstance(value, torch.Tensor) and not (name == "step" and keeps_step):
                    state[name] = move_tensor(value, device)


def _follow(optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
    with _moved.lock:
        if _moved.seen.get(optimizer) == _moved.times:
            return
        _moved.seen[optimizer] = _moved.times
        move_optimizer_state(optimizer, all_parameters=False)
