"""Adding hooks to modules and removing them."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from anydevice.hooks.base import ModelHook, SequentialHook, hooks_of
from anydevice.hooks.forward import HOOK, ORIGINAL, HookedForward, OwnForward, own_forward
from anydevice.hooks.other_processes import prepare_torch
from anydevice.interrupts import uninterrupted
from anydevice.weights import iter_modules

__all__ = [
    "add_hook_to_module",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "remove_matching_hooks",
]


def add_hook_to_module(module: nn.Module, hook: ModelHook, append: bool = False) -> nn.Module:
    """Put a hook around a module's forward. `remove_hook_from_module` undoes it.

    Args:
        module: the module; changed in place.
        hook: the hook. It takes the place of one that is there already.
        append: keep the one that is there, and run this one after it (`SequentialHook`).

    Returns:
        The same module.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import ModelHook, add_hook_to_module
        >>> class Double(ModelHook):
        ...     def post_forward(self, module, output):
        ...         return 2 * output
        >>> layer = add_hook_to_module(nn.Identity(), Double())
        >>> layer(torch.ones(2))
        tensor([2., 2.])
    """
    return uninterrupted(lambda: _add_hook(module, hook, append))


def _add_hook(module: nn.Module, hook: ModelHook, append: bool) -> nn.Module:
    prepare_torch()
    state = module.__dict__
    if not append:
        remove_hook_from_module(module)
    before = hooks_of(module)
    module = hook.init_hook(module)
    state[HOOK] = SequentialHook(*before, hook) if before else hook
    if not before:
        state[ORIGINAL] = own_forward(module)
    state["forward"] = HookedForward(module)
    return module


def remove_hook_from_module(module: nn.Module, recurse: bool = False) -> nn.Module:
    """Remove a module's hook, and put its own forward back.

    Args:
        module: the module; changed in place. One without a hook is left as it is.
        recurse: whether the hooks of all its submodules are removed too.

    Returns:
        The same module.

    Example:
        >>> from torch import nn
        >>> from anydevice.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
        >>> layer = add_hook_to_module(nn.Linear(2, 2), ModelHook())
        >>> layer = remove_hook_from_module(layer)
        >>> "forward" in vars(layer)
        False
    """

    def remove() -> nn.Module:
        # The outermost is the last, and finds a model without hooks.
        for _, part in reversed(list(iter_modules(module))) if recurse else [("", module)]:
            _remove_hook(part)
        return module

    return uninterrupted(remove)


def _remove_hook(module: nn.Module) -> None:
    state = module.__dict__
    hook = state.pop(HOOK, None)
    original = state.pop(ORIGINAL, None)
    if original is not None:
        if type(original) is OwnForward:
            state.pop("forward", None)
        else:  # one that the user had put in the instance
            state["forward"] = original
    if hook is not None:
        hook.detach_hook(module)


def remove_hook_from_submodules(module: nn.Module) -> None:
    """Remove the hooks of a module and all its submodules. Weights stay where they are stored.

    The result is an ordinary model with the same Parameters, and with its ties. Weights that
    were offloaded are host tensors, and buffers that were kept on a device for them join them
    there; `anydevice.undispatch` also moves all to one device.

    Args:
        module: the module; changed in place.

    Example:
        >>> from torch import nn
        >>> from anydevice import cpu_offload
        >>> from anydevice.hooks import remove_hook_from_submodules
        >>> model = cpu_offload(nn.Sequential(nn.Linear(2, 2)), "cpu")
        >>> remove_hook_from_submodules(model)
        >>> "forward" in vars(model[0])
        False
    """
    remove_hook_from_module(module, recurse=True)


def remove_matching_hooks(module: nn.Module, matches: Callable[[ModelHook], bool]) -> None:
    """Remove those hooks of one module that match."""
    hooks = hooks_of(module)
    kept = [hook for hook in hooks if not matches(hook)]
    if not kept:
        remove_hook_from_module(module)
    elif len(kept) < len(hooks):
        module.__dict__[HOOK] = SequentialHook(*kept) if len(kept) > 1 else kept[0]
        for gone in hooks:
            if gone not in kept:
                gone.detach_hook(module)
