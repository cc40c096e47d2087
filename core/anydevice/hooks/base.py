"""A hook around a module's forward; attaching and removing hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from anydevice.hooks.forward import HOOK
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.types import Args, Forward, Kwargs

__all__ = ["ModelHook", "SequentialHook", "hooks_of"]


class ModelHook:
    """Code that runs before and after a module's forward; unlike torch's hooks, it gets kwargs.

    Override `pre_forward` and `post_forward`; or `run_forward`, which runs the whole call, where
    something must also happen when the forward raises.

    Attributes:
        no_grad: run the forward under `torch.no_grad`.

    Example:
        >>> import torch
        >>> from anydevice.hooks import ModelHook, add_hook_to_module
        >>> from torch import nn
        >>> class Print(ModelHook):
        ...     def post_forward(self, module, output):
        ...         print(type(module).__name__, tuple(output.shape))
        ...         return output
        >>> layer = add_hook_to_module(nn.Linear(2, 3), Print())
        >>> _ = layer(torch.ones(1, 2))
        Linear (1, 3)
    """

    no_grad: ClassVar[bool] = False

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is attached.

        Args:
            module: the module it is attached to.

        Returns:
            The module.
        """
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Run just before the forward.

        Args:
            module: the module whose forward comes next.
            *args: its positional arguments.
            **kwargs: its keyword arguments.

        Returns:
            The arguments to give to the forward.
        """
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Run just after the forward.

        Args:
            module: the module whose forward has just returned.
            output: what it returned.

        Returns:
            What the caller gets.
        """
        return output

    def run_forward(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of the hooked module: `pre_forward`, the forward, `post_forward`.

        Args:
            module: the hooked module.
            forward: its forward; where it has several hooks, with the hooks after this one.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            What the caller gets.
        """
        return _run_plain((self,), module, forward, args, kwargs)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Run when the hook is removed.

        Args:
            module: the module it is removed from.

        Returns:
            The module.
        """
        return module


class SequentialHook(ModelHook):
    """Several hooks as one; each event goes through them in order.

    A hook that overrides `run_forward` runs the call of those after it.

    Args:
        *hooks: the hooks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import ModelHook, SequentialHook, add_hook_to_module
        >>> layer = add_hook_to_module(nn.Linear(2, 2), SequentialHook(ModelHook(), ModelHook()))
        >>> layer(torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    def __init__(self, *hooks: ModelHook) -> None:
        self.hooks = hooks

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Attach each."""
        for hook in self.hooks:
            module = hook.init_hook(module)
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Args, Kwargs]:
        """Pass the arguments through each."""
        for hook in self.hooks:
            args, kwargs = hook.pre_forward(module, *args, **kwargs)
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Pass the output through each."""
        for hook in self.hooks:
            output = hook.post_forward(module, output)
        return output

    def run_forward(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run a call with all hooks."""
        for i, hook in enumerate(self.hooks):
            if type(hook).run_forward is not ModelHook.run_forward:
                rest = SequentialHook(*self.hooks[i + 1 :]) if i + 1 < len(self.hooks) else None
                inner = forward if rest is None else _bind(rest, module, forward)
                inner = _bind(hook, module, inner)
                return _run_plain(self.hooks[:i], module, inner, args, kwargs)
        return _run_plain(self.hooks, module, forward, args, kwargs)

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Detach each."""
        for hook in self.hooks:
            module = hook.detach_hook(module)
        return module


def hooks_of(module: nn.Module) -> tuple[ModelHook, ...]:
    """The hooks of a module, in order; none where it has no hook."""
    hook: ModelHook | None = module.__dict__.get(HOOK)
    if hook is None:
        return ()
    return tuple(hook.hooks) if isinstance(hook, SequentialHook) else (hook,)


def _run_plain(
    hooks: Sequence[ModelHook], module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs
) -> Any:
    """Run a forward between the `pre_forward` and the `post_forward` of some hooks."""
    for hook in hooks:
        args, kwargs = hook.pre_forward(module, *args, **kwargs)
    no_grad = any(hook.no_grad for hook in hooks)
    with torch.no_grad() if no_grad else contextlib.nullcontext():
        output = forward(*args, **kwargs)

    def finish(result: Any) -> Any:
        for hook in hooks:
            result = hook.post_forward(module, result)
        return result

    if type(output) in RESUMABLE:
        return resume(output, Call(contextlib.nullcontext, partial(_step, no_grad), finish))
    return finish(output)


def _step(no_grad: bool, function: Callable[[Any], Any], value: Any) -> Any:
    with torch.no_grad() if no_grad else contextlib.nullcontext():
        return function(value)


def _bind(hook: ModelHook, module: nn.Module, forward: Forward) -> Forward:
    return lambda *args, **kwargs: hook.run_forward(module, forward, args, kwargs)
