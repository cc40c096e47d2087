"""Calls of a module whose hook has its inputs and weights on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from anydevice.devices import DeviceLike, parse_device
from anydevice.hooks.aliases import Alias
from anydevice.hooks.backward import prepare_backward
from anydevice.hooks.base import ModelHook
from anydevice.hooks.cross_device import Alignment
from anydevice.hooks.execution import are_there, execute, step_on
from anydevice.hooks.failures import explain_failure
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.types import Args, Forward, Kwargs
from anydevice.hooks.writeback import SentArguments
from anydevice.interrupts import uninterrupted
from anydevice.nested import find_device
from anydevice.tensors import send_to_device
from anydevice.transfer import Engine, GroupCall, OffloadGroup, PassCall

__all__ = ["AlignedCalls"]


class AlignedCalls(ModelHook):
    """The part of `AlignDevicesHook` that runs calls; see there for the attributes."""

    io_same_device: bool
    skip_keys: str | list[str] | None

    def __init__(self) -> None:
        self.group: OffloadGroup | None = None
        self.passes: Engine | None = None
        self.alignment = Alignment.INHERITED
        #: Modules whose children are part of what the hook covers, with these children.
        self._watched: Sequence[tuple[dict[str, Any], tuple[Any, ...]]] = ()
        self._aliases: Sequence[Alias] = ()
        #: Whether a call only needs weights and arguments in place, and the forward no context.
        self._is_plain = self._is_direct = False
        self._runs_in_backward = False

    @property
    def execution_device(self) -> Any:
        """Where the module runs, in the spelling in which it was given."""
        return self._execution_device

    @execution_device.setter
    def execution_device(self, device: DeviceLike | None) -> None:
        self._execution_device = device
        self._device = parse_device(device) if device is not None else None
        self._target = self._device.torch if self._device is not None else None

    def simplify(self) -> None:
        """Find out what a call of this hook never has to do, so that it costs nothing."""
        kind = type(self)
        self._is_plain = (
            self.passes is None
            and not self.io_same_device
            and not self._aliases
            and not self._runs_in_backward
            and kind.pre_forward is AlignedCalls.pre_forward
            and kind.post_forward is AlignedCalls.post_forward
        )
        on_device = self._device is not None and self._device.is_accelerator
        self._is_direct = self.alignment is Alignment.INHERITED and not on_device

    def _regroup(self, module: nn.Module) -> None:
        """Cover the module as it is now, after its structure has changed."""
        raise NotImplementedError

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Send arguments to the execution device; what is there stays as it is."""
        target = self._target
        if target is not None and not are_there(args, kwargs, target):
            args = send_to_device(args, target, skip_keys=self.skip_keys)
            kwargs = send_to_device(kwargs, target, skip_keys=self.skip_keys)
        return args, kwargs

    def run_forward(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a call with weights and arguments on the execution device.

        Raises:
            UnplacedWeightError: an operator got tensors of several devices, and weights of the
                module are not where it runs; or a weight was never loaded. The message names them.
        """
        for children, expected in self._watched:
            if (children or expected) and tuple(children.values()) != expected:
                uninterrupted(lambda: self._regroup(module))
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
                    output = execute(self._device, None, self.alignment, forward, args, kwargs)
            except RuntimeError as error:
                explain_failure(module, self._target, self.group, error)
                raise
            if type(output) not in RESUMABLE:
                return output
            return self._resume(module, output, None, self.alignment, None)
        return self._run(module, forward, args, kwargs)

    def _run(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        input_device = find_device((args, kwargs)) if self.io_same_device else None
        kind = type(self)
        sent, alignment = None, self.alignment
        calls = self._calls()
        try:
            try:
                self._enter(calls)
                if kind.pre_forward is not AlignedCalls.pre_forward:
                    args, kwargs = self.pre_forward(module, *args, **kwargs)
                if self._device is not None and not are_there(args, kwargs, self._target):
                    sent = SentArguments(args, kwargs, self._device, self.skip_keys)
                    args, kwargs = sent.args, sent.kwargs
                    alignment = Alignment.ON if sent.have_modules else alignment
                output = execute(self._device, sent, alignment, forward, args, kwargs)
                if self._runs_in_backward and torch.is_grad_enabled():
                    prepare_backward(self.group, self._device, alignment, (args, kwargs), output)
                if type(output) in RESUMABLE:
                    return self._resume(module, output, sent, alignment, input_device)
                if kind.post_forward is not AlignedCalls.post_forward:
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
        alignment: Alignment,
        input_device: torch.device | None,
    ) -> Any:
        """Run a forward that returned before its body has run."""
        step = partial(step_on, self._device, sent, alignment)
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
