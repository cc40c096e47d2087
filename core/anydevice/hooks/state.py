"""Looking at hooked modules, and loading their weights outside of a forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from anydevice.devices import DeviceLike, parse_device
from anydevice.hooks.align import AlignDevicesHook
from anydevice.hooks.base import hooks_of
from anydevice.transfer import Engine
from anydevice.weights import iter_modules

__all__ = ["align_hook_of", "align_module_device", "has_offloaded_params"]


def align_hook_of(module: nn.Module) -> AlignDevicesHook | None:
    """The module's `AlignDevicesHook`, also where it is one of several; None without one."""
    return next((h for h in hooks_of(module) if isinstance(h, AlignDevicesHook)), None)


def has_offloaded_params(module: nn.Module) -> bool:
    """Whether a module has a hook that offloads its weights.

    Args:
        module: the module.

    Example:
        >>> from torch import nn
        >>> from anydevice import cpu_offload
        >>> from anydevice.hooks import has_offloaded_params
        >>> layer = cpu_offload(nn.Linear(2, 2), "cpu")
        >>> has_offloaded_params(nn.Linear(2, 2)), has_offloaded_params(layer)
        (False, True)
    """
    hook = align_hook_of(module)
    return hook is not None and hook.offload


@contextlib.contextmanager
def align_module_device(
    module: nn.Module, execution_device: DeviceLike | None = None
) -> Iterator[None]:
    """Have the weights of a module and its parts on one device while the context lasts.

    Changes made to them in place inside are kept, also those made by ``weight.data``.

    Args:
        module: the module; offloaded or not.
        execution_device: the device; by default that of the module's hook. Without a hook nothing
            is moved.

    Example:
        >>> from torch import nn
        >>> from anydevice.hooks import align_module_device
        >>> layer = nn.Linear(2, 2)
        >>> with align_module_device(layer, "cpu"):
        ...     print(layer.weight.device)
        cpu
    """
    hook = align_hook_of(module)
    device = execution_device
    if device is None and hook is not None and hook.offload:
        device = hook.execution_device
    if device is None:
        yield
        return
    engine = Engine(prefetch_depth=0)
    parts = list(iter_modules(module))
    group = engine.group(type(module).__name__, parts, parse_device(device))
    group.compares = True
    try:
        with group.call():
            yield
    finally:
        engine.close()
