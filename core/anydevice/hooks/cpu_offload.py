"""Whole models that share one device, one at a time."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from anydevice import registry
from anydevice.devices import CPU, Device, DeviceLike, parse_device
from anydevice.hooks.base import ModelHook
from anydevice.hooks.execution import run_on
from anydevice.hooks.forward import HOOK, ORIGINAL, OwnForward, PartForward, has_own_forward
from anydevice.hooks.registration import (
    add_hook_to_module,
    remove_hook_from_module,
    remove_matching_hooks,
)
from anydevice.hooks.types import Args, Forward, Kwargs
from anydevice.interrupts import uninterrupted
from anydevice.relocation import Relocation, move_weights
from anydevice.tensors import send_to_device
from anydevice.ties import Weight, gather_weights
from anydevice.transfer import copy_batch, page_lock
from anydevice.weights import iter_modules, iter_slots

__all__ = ["CpuOffload", "UserCpuOffloadHook"]


class _Presence:
    """Whether a model's weights are on the device; shared by the hooks of its parts."""

    is_entered = False


class CpuOffload(ModelHook):
    """Keeps a model on the host until its forward, then on a device until it is sent back.

    The forward of any part loads the whole model, such as when ``vae.decode`` calls
    ``vae.decoder``. The host's copy is kept, so that sending back copies only what was changed.

    Args:
        execution_device: where the model runs; by default the first accelerator, else the host.
        prev_module_hook: the handle of the model that has its turn before; its `offload` is called
            just before this model's forward.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import CpuOffload, add_hook_to_module
        >>> layer = add_hook_to_module(nn.Linear(2, 2), CpuOffload("cpu"))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
    ) -> None:
        self.prev_module_hook = prev_module_hook
        if execution_device is None:
            execution_device = parse_device(registry.primary_type() or CPU).torch
        self.execution_device = execution_device
        self._device = parse_device(self.execution_device)
        self._presence = _Presence()
        # By id of a weight on the device: what it held on the host, and its mark when it came.
        self._kept: dict[int, tuple[torch.Tensor, object]] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Send the model to the host, and hook its parts."""
        move_weights(_weights(module, CPU))
        for _, part in iter_modules(module):
            if part is not module and has_own_forward(part):
                plain = HOOK not in part.__dict__
                add_hook_to_module(part, _CpuOffloadPart(self, module), append=True)
                if plain and type(part.__dict__[ORIGINAL]) is OwnForward:
                    part.__dict__["forward"] = PartForward(part, self._presence).forward
        return module

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Remove the hooks of the parts; the model stays where it is."""

        def is_of_part(hook: ModelHook) -> bool:
            return isinstance(hook, _CpuOffloadPart) and hook.whole is self

        for _, part in iter_modules(module):
            if part is not module:
                remove_matching_hooks(part, is_of_part)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Offload the previous model; load this one and its inputs onto the device."""
        self.onload(module)
        args = send_to_device(args, self._device)
        return args, send_to_device(kwargs, self._device)

    def run_forward(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a call with the model and its inputs on the device."""
        self.onload(module)
        return run_on(self._device, module, forward, args, kwargs)

    def onload(self, module: nn.Module) -> None:
        """Send the previous model back, and load this one."""
        if self.prev_module_hook is not None and self.prev_module_hook.hook is not self:
            self.prev_module_hook.offload()
        # Weights outlive the inference mode that they may be called in, and count their changes.
        with torch.inference_mode(False):
            self._onload([w for w in _weights(module, self._device) if not w.is_there])
        self._presence.is_entered = True

    def _onload(self, weights: list[Weight]) -> None:
        """Queue the copies of all weights together; the device may still be computing."""
        for weight in weights:
            weight.check_value()
        page_lock([w.tensor for w in weights if w.tensor.device == CPU.torch], self._device)
        originals = [weight.tensor.detach() for weight in weights]
        arrived = copy_batch(originals, self._device)

        def put() -> None:
            for weight, host, new in zip(weights, originals, arrived, strict=True):
                weight.hold(new)
                if host.device == CPU.torch:
                    self._kept[id(weight.tensor)] = (host, _mark(weight.tensor))

        if weights:
            uninterrupted(put)

    def offload(self, module: nn.Module) -> None:
        """Send the model to the host."""
        uninterrupted(lambda: self._offload(module))

    def _offload(self, module: nn.Module) -> None:
        self._presence.is_entered = False
        with torch.inference_mode(False):
            relocation = Relocation()
            for weight in _weights(module, CPU):
                if not weight.is_there:
                    host, mark = self._kept.get(id(weight.tensor), (None, None))
                    relocation.add(weight, host if mark == _mark(weight.tensor) else None)
            relocation.commit()
        self._kept.clear()


class _CpuOffloadPart(ModelHook):
    """Loads the whole model when a part of it is called by itself.

    Args:
        whole: the model's hook.
        model: the model; not held.
    """

    def __init__(self, whole: CpuOffload, model: nn.Module) -> None:
        self.whole = whole
        self._model = weakref.ref(model)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.whole, self._model())

    def run_forward(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a call with the model and the inputs on the device."""
        model = self._model()
        if model is not None and not self.whole._presence.is_entered:
            self.whole.onload(model)
        return run_on(self.whole._device, module, forward, args, kwargs)


class UserCpuOffloadHook:
    """What `anydevice.cpu_offload_with_hook` hands to the user: a model and its hook.

    Args:
        model: the model.
        hook: its `CpuOffload`.

    Example:
        >>> from torch import nn
        >>> from anydevice import cpu_offload_with_hook
        >>> model, hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
        >>> hook.offload()
        >>> hook.remove()
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
