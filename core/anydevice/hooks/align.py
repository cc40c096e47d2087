"""The hook that has a module's inputs and weights on one device for its forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from anydevice.devices import CPU, Device, DeviceLike, parse_device
from anydevice.errors import ModelError
from anydevice.hooks.aliases import Alias, find_aliases
from anydevice.hooks.backward import prepare_backward
from anydevice.hooks.base import ModelHook
from anydevice.hooks.code_search import runs_in_backward
from anydevice.hooks.execution import are_there, execute
from anydevice.hooks.failures import STRIPPED, explain_failure
from anydevice.hooks.forward import HOOK
from anydevice.hooks.moving import allow_moves, refuse_moves
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.storing import settle, store_on_host
from anydevice.hooks.writeback import SentArguments
from anydevice.modules import own_device
from anydevice.tensors import find_device, move_tensor, send_to_device
from anydevice.ties import gather_weights
from anydevice.transfer import Engine, GroupCall, OffloadGroup, PassCall
from anydevice.weights import Slot, iter_modules, iter_slots, scales_weight

__all__ = ["AlignDevicesHook", "Regrouping"]


class Regrouping(Protocol):
    """Groups and hooks the parts of a module anew, after its structure has changed."""

    def regroup(self, module: nn.Module, hook: AlignDevicesHook) -> None:
        """Set the hook up for the module as it is now, and hook its parts.

        Args:
            module: the module.
            hook: its hook.
        """


class AlignDevicesHook(ModelHook):
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
        group: weights that travel together, made by the caller; by default the hook makes its own.
        engine: the engine of a group that the hook makes; by default one of its own.
        passes: the engine that is told where calls of the whole model begin and end.
        align: True aligns operators in the module's own code (`anydevice.hooks.cross_device`),
            False stops an outer module's alignment, None changes nothing.

    Example:
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
        *,
        group: OffloadGroup | None = None,
        engine: Engine | None = None,
        passes: Engine | None = None,
        align: bool | None = None,
    ) -> None:
        self.execution_device = execution_device
        self.offload = offload
        self.io_same_device = io_same_device
        self.weights_map = weights_map
        self.offload_buffers = offload_buffers
        self.place_submodules = place_submodules
        self.skip_keys = skip_keys
        self.tied_params_map = tied_params_map
        self.group = group
        self.engine = engine
        self.passes = passes
        self.align = align
        #: Names of buffers that are on the execution device for the hooks' sake, though their
        #: module is offloaded; they go to the host when the hooks are removed.
        self.resident_buffers: frozenset[str] = frozenset()
        self._regrouping: Regrouping | None = None
        #: Modules whose children are part of what the hook covers, with these children.
        self._watched: Sequence[tuple[dict[str, Any], tuple[Any, ...]]] = ()
        self._aliases: Sequence[Alias] = ()
        self._loading: Any = None
        #: Whether a call only needs weights and arguments in place, and the forward no context.
        self._is_plain = self._is_direct = False
        self._runs_in_backward = False

    @classmethod
    def planned(
        cls, execution: Device | None, regrouping: Regrouping, **settings: Any
    ) -> AlignDevicesHook:
        """Make a hook for weights that are where they are stored: attaching it moves nothing.

        Args:
            execution: where the module runs; None leaves inputs alone.
            regrouping: called when the structure of the module has changed.
            **settings: see the class.
        """
        hook = cls(execution.torch if execution is not None else None, **settings)
        hook._regrouping = regrouping
        return hook

    @property
    def execution_device(self) -> Any:
        """Where the module runs, in the spelling in which it was given."""
        return self._execution_device

    @execution_device.setter
    def execution_device(self, device: DeviceLike | None) -> None:
        self._execution_device = device
        self._device = parse_device(device) if device is not None else None
        self._target = self._device.torch if self._device is not None else None

    # ------------------------------------------------------------------ attaching

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Move the module's weights to where they are stored."""
        self._runs_in_backward = runs_in_backward(module)
        self._simplify()
        if self.passes is not None:
            register: Any = module.register_load_state_dict_pre_hook
            self._loading = register(settle)
            refuse_moves(module)
        if self._regrouping is not None or (self.execution_device is None and not self.offload):
            return module
        device = self._own_device(module)

        def stored(_name: str, slot: Slot) -> Device:
            goes = self.offload_buffers or not slot.is_buffer or scales_weight(slot)
            return CPU if self.offload and goes else device

        slots = list(iter_slots(module, recurse=self.place_submodules))
        for weight in gather_weights(slots, stored):
            if weight.device == CPU and self.offload and self.weights_map is not None:
                weight.hold(move_tensor(self._value(weight.names[0]).detach(), CPU))
            else:
                weight.move()
        if self.offload:
            self.resident_buffers = frozenset(n for n, s in slots if stored(n, s) != CPU)
        self._make_group(module, device)
        return module

    def _make_group(self, module: nn.Module, device: Device) -> None:
        parts = list(iter_modules(module)) if self.place_submodules else [("", module)]
        if self.engine is None:
            self.engine = Engine()
        group = self.engine.group(type(module).__name__, parts, device)
        self.cover(group, [part for _, part in parts], watched=self.place_submodules)

    def cover(
        self,
        group: OffloadGroup | None,
        modules: Sequence[nn.Module],
        watched: bool | Sequence[nn.Module] = True,
    ) -> None:
        """Let the hook bring a group of weights.

        Args:
            group: the weights.
            modules: the modules that own them.
            watched: the modules whose children belong to the group, or whether those of all do.
        """
        self.group = group
        owners = modules if watched is True else watched or ()
        self._watched = [(m._modules, tuple(m._modules.values())) for m in owners]
        self._aliases = find_aliases(modules)
        self._simplify()

    def _simplify(self) -> None:
        """Find out what a call of this hook never has to do, so that it costs nothing."""
        kind = type(self)
        self._is_plain = (
            self.passes is None
            and not self.io_same_device
            and not self._aliases
            and not self._runs_in_backward
            and kind.pre_forward is AlignDevicesHook.pre_forward
            and kind.post_forward is AlignDevicesHook.post_forward
        )
        on_device = self._device is not None and self._device.is_accelerator
        self._is_direct = self.align is None and not on_device

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

    # ------------------------------------------------------------------ a call

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send arguments to the execution device; what is there stays as it is."""
        target = self._target
        if target is not None and not are_there(args, kwargs, target):
            args = send_to_device(args, target, skip_keys=self.skip_keys)
            kwargs = send_to_device(kwargs, target, skip_keys=self.skip_keys)
        return args, kwargs

    def run_forward(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a call with weights and arguments on the execution device.

        Raises:
            UnplacedWeightError: an operator got tensors of several devices, and weights of the
                module are not where it runs; or a weight was never loaded. The message names them.
        """
        for children, expected in self._watched:
            if tuple(children.values()) != expected:
                self._regroup(module)
                break
        group = self.group
        if (
            self._is_plain
            and (group is None or group.is_ready())
            and are_there(args, kwargs, self._target)
        ):  # the usual call: nothing has to be moved, so there is nothing to undo
            try:
                if self._is_direct:
                    output = forward(*args, **kwargs)
                else:
                    output = execute(self._device, None, self.align, forward, args, kwargs)
            except RuntimeError as error:
                explain_failure(module, self._target, self.group, error)
                raise
            if type(output) not in RESUMABLE:
                return output
            return self._resume(module, output, None, self.align, None)
        return self._run(module, forward, args, kwargs)

    def _run(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        input_device = find_device((args, kwargs)) if self.io_same_device else None
        kind = type(self)
        sent, align = None, self.align
        calls = self._calls()
        try:
            try:
                self._enter(calls)
                if kind.pre_forward is not AlignDevicesHook.pre_forward:
                    args, kwargs = self.pre_forward(module, *args, **kwargs)
                if self._device is not None and not are_there(args, kwargs, self._target):
                    sent = SentArguments(args, kwargs, self._device, self.skip_keys)
                    args, kwargs = sent.args, sent.kwargs
                    align = align or sent.have_modules or align
                output = execute(self._device, sent, align, forward, args, kwargs)
                if self._runs_in_backward and torch.is_grad_enabled():
                    prepare_backward(self.group, self._device, align, (args, kwargs), output)
                if type(output) in RESUMABLE:
                    return self._resume(module, output, sent, align, input_device)
                if kind.post_forward is not AlignDevicesHook.post_forward:
                    output = self.post_forward(module, output)
            finally:
                self._leave(calls)
        except RuntimeError as error:
            explain_failure(module, self._target, self.group, error)
            raise
        finally:
            self._leave(calls)  # an interrupt may have cut the first short
        if input_device is not None:
            return send_to_device(output, input_device, skip_keys=self.skip_keys)
        return output

    def _resume(
        self,
        module: nn.Module,
        body: Any,
        sent: SentArguments | None,
        align: bool | None,
        input_device: torch.device | None,
    ) -> Any:
        """Run a forward that returned before its body has run."""

        def step(function: Callable[[Any], Any], value: Any) -> Any:
            return execute(self._device, sent, align, function, (value,), {})

        finish = partial(self._finish, module, input_device)
        return resume(body, Call(self._hold, step, finish))

    @contextlib.contextmanager
    def _hold(self) -> Iterator[None]:
        """Have the weights on the device while a forward that runs in steps lasts."""
        calls = self._calls()
        try:
            try:
                self._enter(calls)
                yield
            finally:
                self._leave(calls)
        finally:
            self._leave(calls)

    def _calls(self) -> tuple[PassCall | None, GroupCall | None]:
        """A call of the whole model, where this hook is on it, and one of the group."""
        return (
            self.passes.whole_pass() if self.passes is not None else None,
            self.group.call() if self.group is not None else None,
        )

    def _enter(self, calls: tuple[PassCall | None, GroupCall | None]) -> None:
        whole, call = calls
        if whole is not None:
            whole.begin()
        if call is not None:
            call.enter()
        for alias in self._aliases:
            alias.follow()

    def _leave(self, calls: tuple[PassCall | None, GroupCall | None]) -> None:
        """Undo `_enter`, as far as it came. May be called again."""
        whole, call = calls
        try:
            if call is not None:
                call.leave()
                for alias in self._aliases:
                    alias.follow()
        finally:
            if whole is not None:
                whole.end()

    def _finish(self, module: nn.Module, input_device: torch.device | None, result: Any) -> Any:
        """Turn the result of a forward that runs in steps into what its caller gets."""
        result = self.post_forward(module, result)
        if input_device is not None:
            return send_to_device(result, input_device, skip_keys=self.skip_keys)
        return result

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
        if self.passes is not None and HOOK in module.__dict__:
            held = module.__dict__[HOOK]
            if self in getattr(held, "hooks", (held,)):
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
        if self.resident_buffers and not any(HOOK in part.__dict__ for part in module.modules()):
            store_on_host(module, self.resident_buffers)
            self.resident_buffers = frozenset()
        return module
