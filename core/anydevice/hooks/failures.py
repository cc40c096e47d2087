"""Errors of hooked modules, with their reason and the remedy."""

from __future__ import annotations

import torch
from torch import nn

from anydevice.errors import UnplacedWeightError
from anydevice.text import list_some
from anydevice.transfer import OffloadGroup
from anydevice.weights import iter_slots

__all__ = ["STRIPPED", "explain_failure"]

STRIPPED = (
    "this {} is dispatched by anydevice, and other code wanted to remove its hooks (accelerate's "
    "remove_hook_from_submodules, which PeftModel.from_pretrained calls for an offloaded model): "
    "its weights would no longer be where it runs. To load an adapter, use "
    "model.load_adapter(path) of a transformers model, or peft's get_peft_model and "
    "set_peft_model_state_dict. To remove the hooks, use anydevice.undispatch or "
    "anydevice.hooks.remove_hook_from_submodules."
)


def explain_failure(
    module: nn.Module,
    target: torch.device | None,
    group: OffloadGroup | None,
    error: RuntimeError,
) -> None:
    """Raise a better error where weights on another device are the reason of one.

    Raises:
        UnplacedWeightError: weights of the module are elsewhere, and no hook loads them.
    """
    if "device" in str(error) and not isinstance(error, UnplacedWeightError):
        stray = _stray(module, target, group)
        if stray:
            raise UnplacedWeightError(_message(module, stray, target)) from error


def _stray(
    module: nn.Module, target: torch.device | None, group: OffloadGroup | None
) -> list[tuple[str, torch.device]]:
    """Weights of the module that are not where it runs, and that no hook loads there."""
    if target is None:
        return []
    loaded = {id(t) for t in group.tensors()} if group is not None else set()
    return [
        (name, tensor.device)
        for name, slot in iter_slots(module)
        if (tensor := slot.get()) is not None
        and tensor.device != target
        and id(tensor) not in loaded
    ]


def _message(
    module: nn.Module, stray: list[tuple[str, torch.device]], target: torch.device | None
) -> str:
    names = list_some([f"{name} ({device})" for name, device in stray])
    return (
        f"{type(module).__name__} runs on {target}, but its weights {names} are elsewhere, "
        "and it seems to use one of them without calling the module that holds it. Name its "
        "class in preload_module_classes, or put both on one device in the device map. If the "
        "model was moved after it was dispatched, undo that with anydevice.undispatch."
    )
