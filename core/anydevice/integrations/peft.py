"""PEFT's adapters on a model that anydevice has dispatched. `transformers.enable` includes it.

``PeftModel.from_pretrained`` removes an offloaded model's hooks and dispatches it again, since its
own hooks cannot follow a module that is replaced. anydevice's can, so the model keeps its placement
and hooks, and the adapters are stored next to the weights that they belong to. Where the caller
gives ``max_memory`` or a dict as ``device_map``, the model is placed again.

Models that anydevice has not dispatched are left to PEFT's own functions.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

from anydevice.dispatch import dispatch_model
from anydevice.hooks import ModelHook
from anydevice.integrations.patching import Patch, require_function
from anydevice.integrations.stand_in import is_importable, standing_in
from anydevice.placement import infer_auto_device_map

__all__ = ["is_dispatched", "patches"]

#: In place of a device map: the model stays where it is.
_AS_IT_IS: Final = {"": "as it is"}


def patches() -> Iterator[Patch]:
    """The patches of PEFT; none where it is not installed.

    Raises:
        MissingDependencyError: PEFT has changed.
    """
    if importlib.util.find_spec("peft") is None:
        return
    with contextlib.nullcontext() if is_importable() else standing_in():
        models = importlib.import_module("peft.peft_model")
        tuners = importlib.import_module("peft.tuners.tuners_utils")

    remove = require_function(models, "remove_hook_from_submodules", ["module"])
    yield Patch(models, "remove_hook_from_submodules", functools.partial(_remove_hooks, remove))
    balance = require_function(models, "get_balanced_memory", ["model", "max_memory"])
    yield Patch(models, "get_balanced_memory", functools.partial(_balance, balance))
    infer = require_function(models, "infer_auto_device_map", ["model", "max_memory"])
    yield Patch(models, "infer_auto_device_map", functools.partial(_infer, infer))
    dispatch = require_function(models, "dispatch_model", ["model", "device_map"])
    yield Patch(models, "dispatch_model", functools.wraps(dispatch)(_dispatcher(dispatch)))
    add_hook = require_function(models, "add_hook_to_module", ["module", "hook"])
    yield Patch(models, "add_hook_to_module", functools.partial(_add_hook, add_hook))
    # Merging is done where a weight is stored: no copy to a device, and none back.
    onload = require_function(tuners, "onload_layer", ["layer"])
    yield Patch(tuners, "onload_layer", functools.partial(_onload, onload))


def is_dispatched(model: nn.Module) -> bool:
    """Whether a model, or a part of it, has hooks of anydevice."""
    return any(isinstance(getattr(m, "_hf_hook", None), ModelHook) for m in model.modules())


def _remove_hooks(original: Callable[..., Any], module: nn.Module) -> Any:
    return None if is_dispatched(module) else original(module)


def _balance(
    original: Callable[..., Any], model: Any, max_memory: Any = None, **options: Any
) -> Any:
    return max_memory if is_dispatched(model) else original(model, max_memory, **options)


def _infer(original: Callable[..., Any], model: Any, max_memory: Any = None, **options: Any) -> Any:
    if not is_dispatched(model):
        return original(model, max_memory, **options)
    return _AS_IT_IS if max_memory is None else infer_auto_device_map(model, max_memory)


def _dispatcher(original: Callable[..., Any]) -> Callable[..., Any]:
    def dispatch(model: Any, device_map: Any, offload_dir: Any = None, **options: Any) -> Any:
        if device_map is _AS_IT_IS:
            return model
        if not is_dispatched(model):
            return original(model, device_map, offload_dir=offload_dir, **options)
        return dispatch_model(model, device_map, offload_dir=offload_dir)

    return dispatch


def _add_hook(original: Callable[..., Any], module: Any, hook: Any, *args: Any) -> Any:
    # The hook would move the output to the input's device, which a dispatched model does already.
    return module if is_dispatched(module) else original(module, hook, *args)


def _onload(original: Callable[..., Any], layer: nn.Module) -> Any:
    return contextlib.nullcontext() if is_dispatched(layer) else original(layer)
