"""The hook that has a module's inputs and weights on one device for its forward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from anydevice.devices import CPU, Device, DeviceLike, parse_device
from anydevice.errors import ModelError
from anydevice.hooks.aliases import find_aliases
from anydevice.hooks.aligned_calls import AlignedCalls
from anydevice.hooks.base import hooks_of
from anydevice.hooks.code_search import runs_in_backward
from anydevice.hooks.failures import STRIPPED
from anydevice.hooks.forward import HOOK
from anydevice.hooks.moving import allow_moves, refuse_moves
from anydevice.modules import own_device
from anydevice.relocation import Relocation, move_weights
from anydevice.ties import gather_weights
from anydevice.transfer import Engine, OffloadGroup
from anydevice.weights import Slot, iter_modules, iter_slots, scales_weight

__all__ = ["AlignDevicesHook", "Regrouping"]


class Regrouping(Protocol):
    """Groups and hooks the parts of a module again, after its structure has changed."""

    def regroup(self, module: nn.Module, hook: AlignDevicesHook) -> None:
        """Set the hook up for the module as it is now, and hook its parts."""


class AlignDevicesHook(AlignedCalls):
    """Has a module's inputs and weights on one device for its forward.

    Offloaded weights are stored in the module as host tensors (in RAM, or mapped from a file).
    During the forward, copies on the execution device take their place; the `anydevice.transfer`
    engine makes these, ahead of time where it can. Weights and modules that are added to the module
    later are moved too.

    Args:
        execution_device: where inputs and weights are for the forward; None leaves inputs alone.
        offload: whether the weights are stored on the host outside of the forward.
        io_same_device: send the output to the device of the first input.
        weights_map: names to host tensors, perhaps lazy, that the offloaded weights are set to. By
            default they keep their values.
        offload_buffers: whether buffers are stored on the host too; else they stay on the execution
            device.
        place_submodules: whether weights of submodules belong to this hook; else only the module's
            own.
        skip_keys: keys of mappings, or names of keyword arguments, that are not moved in or out.
        tied_params_map: accepted for compatibility: a Parameter stays one object here, so ties hold
            without it.

    Example:
        >>> import torch
        >>> from anydevice.hooks import AlignDevicesHook
        >>> from torch import nn
        >>> from anydevice.hooks import add_hook_to_module
        >>> layer = add_hook_to_module(nn.Linear(2, 2), AlignDevicesHook("cpu", offload=True))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    def __init__(
        self,
        execution_device: DeviceLike | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        weights_map: Mapping[str, torch.Tensor] | None = None,
        offload_buffers: bool = False,
        place_submodules: bool = False,
        skip_keys: str | list[str] | None = None,
        tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self._engine: Engine | None = None
        #: Names of buffers that are on the execution device for the hooks' sake, though their
        #: module is offloaded; they go to the host when the hooks are removed.
        self.resident_buffers: frozenset[str] = frozenset()
        self._regrouping: Regrouping | None = None
        self._loading: Any = None

    @classmethod
    def planned(
        cls,
        execution: Device | None,
        regrouping: Regrouping,
        passes: Engine | None,
        io_same_device: bool,
        skip_keys: str | list[str] | None,
    ) -> AlignDevicesHook:
        """Make a hook for weights that are where they are stored: attaching it moves nothing.

        Args:
            execution: where the module runs; None leaves inputs alone.
            regrouping: called when the structure of the module has changed.
            passes: the engine that is notified where calls of the whole model begin and end.
            io_same_device: see the class.
            skip_keys: see the class.
        """
        device = execution.torch if execution is not None else None
        hook = cls(device, io_same_device=io_same_device, skip_keys=skip_keys)
        hook._regrouping, hook.passes = regrouping, passes
        return hook

    # ------------------------------------------------------------------ attaching

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's weights to where they are stored."""
        self._runs_in_backward = runs_in_backward(module)
        self.simplify()
        if self.passes is not None:
            register: Any = module.register_load_state_dict_pre_hook
            self._loading = register(_settle)
            refuse_moves(module)
        if self._regrouping is not None or (self.execution_device is None and not self.offload):
            return module
        device = self._own_device(module)

        def stored(_name: str, slot: Slot) -> Device:
            goes = self.offload_buffers or not slot.is_buffer or scales_weight(slot)
            return CPU if self.offload and goes else device

        slots = list(iter_slots(module, recurse=self.place_submodules))
        relocation = Relocation()
        for weight in gather_weights(slots, stored):
            given = weight.device == CPU and self.offload and self.weights_map is not None
            relocation.add(weight, self._value(weight.names[0]) if given else None)
        relocation.commit()
        if self.offload:
            self.resident_buffers = frozenset(n for n, s in slots if stored(n, s) != CPU)
        self._make_group(module, device)
        return module

    def _make_group(self, module: nn.Module, device: Device) -> None:
        parts = list(iter_modules(module)) if self.place_submodules else [("", module)]
        self._engine = self._engine or Engine()
        group = self._engine.group(type(module).__name__, parts, device)
        self.cover(group, [part for _, part in parts], watched=self.place_submodules)

    def cover(
        self,
        group: OffloadGroup | None,
        modules: Sequence[nn.Module],
        watched: bool | Sequence[nn.Module] = True,
    ) -> None:
        """Let the hook load a group of weights.

        Args:
            group: the weights.
            modules: the modules that own them.
            watched: the modules whose children belong to the group, or whether those of all do.
        """
        self.group = group
        owners = modules if watched is True else watched or ()
        self._watched = [(m._modules, tuple(m._modules.values())) for m in owners]
        self._aliases = find_aliases(modules)
        self.simplify()

    def _own_device(self, module: nn.Module) -> Device:
        if self._device is not None:
            return self._device
        device = own_device(module)
        self.execution_device = device.torch
        return device

    def _value(self, name: str) -> torch.Tensor:
        assert self.weights_map is not None
        try:
            return self.weights_map[name]
        except KeyError:
            raise ModelError(f"weights_map has no {name!r}, which the hooked module has") from None

    def _regroup(self, module: nn.Module) -> None:
        if self._regrouping is not None:
            self._regrouping.regroup(module, self)
        else:
            self._make_group(module, self._own_device(module))

    # ------------------------------------------------------------------ removing

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights where they are stored; buffers that were elsewhere join them.

        Where parts of the module are still hooked, these need the buffers where they are.

        Raises:
            ModelError: other code than anydevice removes the hooks of a dispatched model.
        """
        if self.passes is not None and self in hooks_of(module):
            raise ModelError(STRIPPED.format(type(module).__name__))
        self.group = None
        self._aliases = self._watched = ()
        if self._loading is not None:
            self._loading.remove()
            self._loading = None
        if self.passes is not None:
            allow_moves(module)
            self.passes.close()  # a model without hooks needs no buffers of its engine
            self.passes = None
        if self.resident_buffers and not any(HOOK in p.__dict__ for _, p in iter_modules(module)):
            _store_on_host(module, self.resident_buffers)
            self.resident_buffers = frozenset()
        return module


def _settle(module: nn.Module, *_args: Any) -> None:
    """Before values are loaded into page-locked weights: what still reads the old has to end."""
    for hook in hooks_of(module):
        if isinstance(hook, AlignDevicesHook) and hook.passes is not None:
            hook.passes.settle()


def _store_on_host(module: nn.Module, buffers: Collection[str]) -> None:
    """Move buffers to the host; not those that are tied to a tensor that belongs elsewhere."""

    def stored(name: str, slot: Slot) -> Device:
        tensor = slot.get()
        return CPU if name in buffers or tensor is None else parse_device(tensor.device)

    weights = gather_weights(iter_slots(module), stored)
    move_weights([w for w in weights if w.device == CPU and not w.tensor.is_meta])
