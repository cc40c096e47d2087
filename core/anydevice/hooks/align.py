"""The hook that brings inputs and weights of a module to one device for its forward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anydevice.devices import CPU, Device, DeviceLike, parse_device
from anydevice.errors import ModelError, UnplacedWeightError
from anydevice.hooks.base import HOOK, ModelHook
from anydevice.hooks.glue import with_glue, without_glue
from anydevice.hooks.writeback import Copies
from anydevice.modules import own_device
from anydevice.tensors import all_on_device, find_device, move_tensor, send_to_device
from anydevice.text import list_some
from anydevice.ties import gather_weights
from anydevice.transfer import Engine, OffloadGroup
from anydevice.weights import Slot, iter_slots

__all__ = ["AlignDevicesHook", "find_aliases"]


class AlignDevicesHook(ModelHook):
    """Brings a module's inputs and weights to one device for its forward.

    Offloaded weights rest in the module as host tensors (in RAM, or mapped from a file). For the
    time of the forward their twins on the execution device stand in their place; the
    `anydevice.transfer` engine makes those, ahead of time where it can.

    Args:
        execution_device: where inputs and weights are for the forward; None leaves inputs alone.
        offload: whether the weights rest on the host outside of the forward.
        io_same_device: send the output to the device of the first input.
        weights_map: names to host tensors, perhaps lazy, that the offloaded weights shall hold. By
            default they keep their values.
        offload_buffers: whether buffers rest on the host too; else they stay on the execution
            device.
        place_submodules: whether weights of submodules belong to this hook; else only the module's
            own.
        skip_keys: keys of mappings, or names of keyword arguments, that are not moved in or out.
        tied_params_map: accepted for compatibility: a Parameter stays one object here, so ties hold
            without it.
        unit: weights that travel together, made by the caller; by default the hook makes its own.
        engine: the engine of a unit that the hook makes; by default one of its own.
        passes: the engine that shall be told where calls of the whole model begin and end.
        glue: True moves tensors of operators in the module's own code to one device, False stops an
            outer module's doing so, None changes nothing (`anydevice.hooks.glue`).
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
        *,
        unit: OffloadGroup | None = None,
        engine: Engine | None = None,
        passes: Engine | None = None,
        glue: bool | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.unit = unit
        self.engine = engine
        self.passes = passes
        self.glue = glue
        #: Buffers that are on the execution device for the hooks' sake, and go back to the host.
        self.lodgers: Sequence[Slot] = ()
        self._aliases: list[_Alias] = []
        self._planned = False
        self._loading: Any = None
        # Devices of the inputs of calls that are under way, by thread.
        self._inputs: dict[int, list[torch.device | None]] = {}
        # Containers copied for a call that is about to run, by thread.
        self._copies: dict[int, Copies] = {}

    @classmethod
    def planned(
        cls,
        execution: Device | None,
        *,
        unit: OffloadGroup | None = None,
        slots: Sequence[Slot] = (),
        passes: Engine | None = None,
        glue: bool | None = None,
        offload: bool = False,
        io_same_device: bool = False,
        skip_keys: str | list[str] | None = None,
        lodgers: Sequence[Slot] = (),
    ) -> AlignDevicesHook:
        """Make a hook for weights that are in their places already: attaching it moves nothing.

        Args:
            execution: where the module runs; None leaves inputs alone.
            unit: what travels for its forward.
            slots: the unit's slots, where the unit is this module's to begin.
            passes: see the class.
            glue: see the class.
            offload: whether any of its weights is offloaded.
            io_same_device: see the class.
            skip_keys: see the class.
            lodgers: buffers of offloaded modules that are on the execution device meanwhile.
        """
        hook = cls(
            execution.torch if execution is not None else None,
            offload=offload,
            io_same_device=io_same_device,
            skip_keys=skip_keys,
            unit=unit,
            passes=passes,
            glue=glue,
        )
        hook._planned = True
        hook.lodgers = lodgers
        hook._aliases = find_aliases(slots)
        return hook

    @property
    def execution_device(self) -> Any:
        """Where the module runs, in the spelling in which it was given."""
        return self._execution_device

    @execution_device.setter
    def execution_device(self, device: DeviceLike | None) -> None:
        self._execution_device = device
        self._target = parse_device(device).torch if device is not None else None

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no calls under way."""
        return {**self.__dict__, "_inputs": {}, "_copies": {}}

    # ------------------------------------------------------------------ attaching

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Put the module's weights where they rest."""
        if self.passes is not None:
            register: Any = module.register_load_state_dict_pre_hook
            self._loading = register(_settle)
        if self._planned or (self.execution_device is None and not self.offload):
            return module
        device = self._device(module)

        def rest(_name: str, slot: Slot) -> Device:
            return CPU if self.offload and (self.offload_buffers or not slot.is_buffer) else device

        slots = list(iter_slots(module, recurse=self.place_submodules))
        for weight in gather_weights(slots, rest):
            if weight.device == CPU and self.offload and self.weights_map is not None:
                weight.hold(move_tensor(self._value(weight.names[0]).detach(), CPU))
            else:
                weight.move()
        if self.offload:
            self.lodgers = [slot for name, slot in slots if rest(name, slot) != CPU]
        away = [(name, slot) for name, slot in slots if rest(name, slot) == CPU and self.offload]
        if away:
            engine = self.engine if self.engine is not None else Engine()
            self.unit = engine.group(type(module).__name__, away, device)
            self._aliases = find_aliases([slot for _, slot in away])
        return module

    def _device(self, module: nn.Module) -> Device:
        if self.execution_device is not None:
            return parse_device(self.execution_device)
        device = own_device(module)
        self.execution_device = device.torch
        return device

    def _value(self, name: str) -> torch.Tensor:
        assert self.weights_map is not None
        try:
            return self.weights_map[name]
        except KeyError:
            raise ModelError(f"weights_map has no {name!r}, which the hooked module has") from None

    # ------------------------------------------------------------------ a call

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Bring weights and arguments to the execution device; what is there stays as it is."""
        unit = self.unit
        if self.passes is not None:
            self.passes.begin_pass()
        if unit is not None:
            try:
                unit.enter()
            except BaseException:
                if self.passes is not None:
                    self.passes.end_pass()
                raise
        try:
            if self._aliases:
                for alias in self._aliases:
                    alias.follow()
            if self.io_same_device:
                calls = self._inputs.setdefault(threading.get_ident(), [])
                calls.append(find_device((args, kwargs)))
            target = self._target
            if target is not None and not _are_there(args, kwargs, target):
                given = (args, kwargs)
                args = send_to_device(args, target, skip_keys=self.skip_keys)
                kwargs = send_to_device(kwargs, target, skip_keys=self.skip_keys)
                self._copies[threading.get_ident()] = Copies(given, (args, kwargs))
        except BaseException:
            self._leave()
            raise
        return args, kwargs

    def run_forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the forward with or without glue, as planned."""
        copies = self._copies.pop(threading.get_ident(), None) if self._copies else None
        try:
            if self.glue is None:
                return forward(*args, **kwargs)
            return (with_glue if self.glue else without_glue)(forward, args, kwargs)
        finally:
            if copies is not None:
                copies.write_back()

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Let the weights rest again; send the output to the input's device where asked."""
        if self.unit is None and not self.io_same_device:
            return output
        device = self._leave()
        if device is not None:
            return send_to_device(output, device, skip_keys=self.skip_keys)
        return output

    def failed_forward(self, module: nn.Module, error: BaseException) -> None:
        """Let the weights rest again; explain an error that comes of weights on another device.

        Raises:
            UnplacedWeightError: an operator met tensors of several devices, and weights of the
                module are not where it runs; the message names them.
        """
        self._leave()
        if isinstance(error, RuntimeError) and "device" in str(error):
            stray = self._stray(module)
            if stray and not isinstance(error, UnplacedWeightError):
                raise UnplacedWeightError(_explain(module, stray, self._target)) from error

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights where they rest; buffers that were away from them join them.

        Where parts of the module are still hooked, these need the buffers where they are.
        """
        self.unit = None
        self._aliases = []
        if self._loading is not None:
            self._loading.remove()
            self._loading = None
        if self.passes is not None:
            self.passes.close()  # a model without hooks needs no buffers of its engine
            self.passes = None
        if self.lodgers and not any(HOOK in part.__dict__ for part in module.modules()):
            _bring_home(module, set(self.lodgers))
            self.lodgers = ()
        return module

    def _leave(self) -> torch.device | None:
        """End a call; return the device of its input when the output shall follow it."""
        device = None
        if self.io_same_device:
            thread = threading.get_ident()
            calls = self._inputs.get(thread)
            if calls:
                device = calls.pop()
                if not calls:
                    del self._inputs[thread]
        if self.unit is not None:
            self.unit.leave()
            for alias in self._aliases:
                alias.follow()
        if self.passes is not None:
            self.passes.end_pass()
        return device

    def _stray(self, module: nn.Module) -> list[tuple[str, torch.device]]:
        """Weights of the module that do not rest where it runs, and that nothing brings there."""
        if self._target is None:
            return []
        brought = {id(slot.get()) for slot in getattr(self.unit, "slots", ())}
        return [
            (name, tensor.device)
            for name, slot in iter_slots(module)
            if (tensor := slot.get()) is not None
            and tensor.device != self._target
            and id(tensor) not in brought
        ]


def _are_there(args: tuple[Any, ...], kwargs: dict[str, Any], target: torch.device) -> bool:
    """Whether no argument has to move: a few comparisons, as it is asked at every call."""
    for item in args:
        if type(item) is torch.Tensor:
            if item.device != target:
                return False
        elif not all_on_device(item, target):
            return False
    for item in kwargs.values():
        if type(item) is torch.Tensor:
            if item.device != target:
                return False
        elif not all_on_device(item, target):
            return False
    return True


def _settle(module: nn.Module, *_args: Any) -> None:
    """Before values are loaded into page-locked weights: what still reads the old has to end."""
    hook = getattr(module, HOOK, None)
    for part in getattr(hook, "hooks", (hook,)):
        passes = getattr(part, "passes", None)
        if passes is not None:
            passes.settle()


def _bring_home(module: nn.Module, lodgers: set[Slot]) -> None:
    """Bring buffers to the host; not those that are tied to a tensor that belongs elsewhere."""

    def home(_name: str, slot: Slot) -> Device:
        tensor = slot.get()
        return CPU if slot in lodgers or tensor is None else parse_device(tensor.device)

    for weight in gather_weights(iter_slots(module), home):
        if weight.device == CPU and not weight.tensor.is_meta:
            weight.move()


class _Alias:
    """A place outside of the tables of a module in which one of its weights stands as well.

    Recurrent layers keep their weights in a list beside; it must hold the twins while they are
    there. The list is looked up each time, as the layer may have made a new one.
    """

    def __init__(self, module: nn.Module, attribute: str, key: Any, slot: Slot) -> None:
        self.module, self.attribute, self.key, self.slot = module, attribute, key, slot

    def follow(self) -> None:
        """Let the place hold what the slot holds."""
        attributes = self.module.__dict__
        if self.key is None:
            attributes[self.attribute] = self.slot.get()
            return
        holder = attributes.get(self.attribute)
        if isinstance(holder, (list, dict)):
            holder[self.key] = self.slot.get()


def find_aliases(slots: Sequence[Slot]) -> list[_Alias]:
    """Find attributes, and items of lists and dicts, of modules that hold weights of theirs.

    Args:
        slots: the weights to look for, in the modules that own them.
    """
    owners: dict[int, tuple[nn.Module, dict[int, Slot]]] = {}
    for slot in slots:
        _, held = owners.setdefault(id(slot.module), (slot.module, {}))
        held[id(slot.get())] = slot
    found = []
    for module, held in owners.values():
        for name, value in module.__dict__.items():
            if name in _TABLES:
                continue
            items: Any = [(None, value)]
            if type(value) is list:
                items = enumerate(value)
            elif type(value) is dict:
                items = value.items()
            found += [_Alias(module, name, k, held[id(v)]) for k, v in items if id(v) in held]
    return found


_TABLES = frozenset({"_parameters", "_buffers", "_modules", "__class__"})


def _explain(
    module: nn.Module, stray: list[tuple[str, torch.device]], target: torch.device | None
) -> str:
    names = list_some([f"{name} ({device})" for name, device in stray])
    return (
        f"{type(module).__name__} runs on {target}, but its weights {names} are elsewhere, "
        "and it seems to use one of them without calling the module that holds it. Name its "
        "class in preload_module_classes, or put both on one device in the device map. If the "
        "model was moved after it was dispatched, undo that with anydevice.undispatch."
    )
