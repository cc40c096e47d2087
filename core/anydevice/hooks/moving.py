"""Refusal to move a dispatched model by ``model.to(device)``, ``model.cpu()`` and the like.

Hooks have the model on several devices; one call of torch cannot move it as they need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from anydevice.errors import ModelError
from anydevice.hooks.forward import OfModule
from anydevice.weights import iter_slots

__all__ = ["allow_moves", "refuse_moves"]

#: The method of modules through which all their methods that move or cast weights go.
_APPLY = "_apply"


def refuse_moves(module: nn.Module) -> None:
    """Let the module, and what contains it, refuse to be moved. Casts (``model.half()``) work."""
    module.__dict__[_APPLY] = _GuardedApply(module)


def allow_moves(module: nn.Module) -> None:
    """Undo `refuse_moves`."""
    module.__dict__.pop(_APPLY, None)


class _GuardedApply(OfModule):
    """Stands as ``_apply`` in a module."""

    def __call__(self, function: Callable[[Any], Any], recurse: bool = True) -> nn.Module:
        """Apply a function to all weights, unless it moves one.

        Raises:
            ModelError: it moves one to another device.
        """
        module = self.__self__
        if recurse:
            devices = {t.device for _, slot in iter_slots(module) if (t := slot.get()) is not None}
            for device in devices:
                moved = function(torch.empty(0, device=device))
                if isinstance(moved, torch.Tensor) and moved.device != device:
                    raise ModelError(
                        f"this {type(module).__name__} is dispatched: its hooks have its weights "
                        f"on {', '.join(sorted(map(str, devices)))}, and moving all of it to "
                        f"{moved.device} would leave hooks that do not fit. Use "
                        f'anydevice.undispatch(model, "{moved.device}"), which removes the hooks '
                        "and moves the model."
                    )
        apply: Callable[..., nn.Module] = type(module)._apply
        return apply(module, function, recurse)
