"""Whole models that take turns on one device."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydevice import registry
from anydevice.devices import CPU, Device, DeviceLike, first_accelerator, parse_device
from anydevice.hooks.base import ModelHook, remove_hook_from_module
from anydevice.tensors import send_to_device
from anydevice.ties import Weight, gather_weights
from anydevice.transfer import copy_batch, page_lock
from anydevice.weights import iter_slots

__all__ = ["CpuOffload", "UserCpuOffloadHook"]


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward, then on a device until it is sent back.

    The host's copy is kept meanwhile, so that sending back copies only what was changed.

    Args:
        execution_device: where the model runs; by default the first accelerator, else the host.
        prev_module_hook: the handle of the model that has its turn before; its `offload` is called
            just before this model's forward.
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        self.execution_device = execution_device if execution_device is not None else _best().torch
        self._device = parse_device(self.execution_device)
        # By id of a weight on the device: what it held on the host, and its mark when it came.
        self._kept: dict[int, tuple[torch.Tensor, object]] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the model to the host."""
        for weight in _weights(module, CPU):
            weight.move()
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the previous model back, bring this one and its inputs to the device."""
        if self.prev_module_hook is not None and self.prev_module_hook.hook is not self:
            self.prev_module_hook.offload()
        # Weights outlive the inference mode that they may be called in, and count their changes.
        with torch.inference_mode(False):
            self._bring([w for w in _weights(module, self._device) if not w.is_there])
        args = send_to_device(args, self._device)
        return args, send_to_device(kwargs, self._device)

    def _bring(self, weights: list[Weight]) -> None:
        """Queue the copies of all weights together; the device may still compute meanwhile."""
        for weight in weights:
            weight.check_value()
        page_lock([w.tensor for w in weights if w.tensor.device == CPU.torch], self._device)
        resting = [weight.tensor.detach() for weight in weights]
        arrived = copy_batch(resting, self._device)
        for weight, host, new in zip(weights, resting, arrived, strict=True):
            weight.hold(new)
            if host.device == CPU.torch:
                self._kept[id(weight.tensor)] = (host, _mark(weight.tensor))

    def offload(self, module: nn.Module) -> None:
        """Send the model to the host."""
        with torch.inference_mode(False):
            for weight in _weights(module, CPU):
                kept = self._kept.pop(id(weight.tensor), None)
                if weight.is_there:
                    continue
                if kept is not None and kept[1] == _mark(weight.tensor):
                    weight.hold(kept[0])
                else:
                    weight.move()
        self._kept.clear()


class UserCpuOffloadHook:
    """What `anydevice.cpu_offload_with_hook` hands to the user: a model and its hook.

    Args:
        model: the model.
        hook: its `CpuOffload`.
    """

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Send the model back to the host."""
        self.hook.offload(self.model)

    def remove(self) -> None:
        """Remove the hook from the model; it stays where it is."""
        remove_hook_from_module(self.model)


def _weights(module: nn.Module, device: Device) -> list[Weight]:
    return gather_weights(iter_slots(module), lambda _name, _slot: device)


def _mark(tensor: torch.Tensor) -> object:
    """What changes when a tensor is written to (but by a method of its ``.data``)."""
    return (id(tensor), tensor.data_ptr(), tensor._version, tensor.dtype)


def _best() -> Device:
    return first_accelerator(parse_device(d) for d in registry.available_devices()) or CPU
