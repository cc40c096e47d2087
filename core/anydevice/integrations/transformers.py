"""transformers' own ``device_map``, carried out by anydevice.

After `enable`, ``from_pretrained(..., device_map="auto")``, ``pipeline(..., device_map=...)`` and
adapters use anydevice's budgets, planner, checkpoint reader and hooks, on every device that has a
backend. accelerate need not be installed. transformers' quantizers and weight conversions are used
as they are. `disable` undoes all of it; models that are loaded already go on working.

``ANYDEVICE_TRANSFORMERS=1`` in the environment enables it when anydevice is imported.

[Note: what is replaced, and why]
transformers has no extension point for where weights go, so functions are replaced where they are
looked up. Each stands in `_patches` with its reason. The range of versions is `_OLDEST` to
`_BELOW`; a function that takes other arguments than expected is refused before anything is changed.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from anydevice.dispatch import dispatch_model
from anydevice.hooks import AlignDevicesHook, add_hook_to_module
from anydevice.integrations import peft
from anydevice.integrations.deferred import DeferredWeights, read_files
from anydevice.integrations.patching import (
    Enabled,
    Integration,
    Patch,
    require_function,
    require_version,
)
from anydevice.integrations.planning import plan, planned_for, read_device_map
from anydevice.modules import extract_model_from_parallel
from anydevice.placement import get_balanced_memory, infer_auto_device_map

__all__ = ["disable", "enable", "integration"]

_OLDEST: Final = (5, 24)
_BELOW: Final = (6, 0)


def enable() -> Enabled:
    """Let anydevice carry out transformers' ``device_map``.

    Calling it again changes nothing.

    Returns:
        A context manager; its end restores the state before.

    Raises:
        MissingDependencyError: transformers is not installed, or not in a version that this is
            written for.

    Example:
        >>> from anydevice.integrations import transformers
        >>> with transformers.enable():
        ...     pass  # from_pretrained(..., device_map=...) is anydevice's here
    """
    return integration.enable()


def disable() -> None:
    """Undo `enable`. Models that are loaded already go on working."""
    integration.disable()


def _patches() -> Iterator[Patch]:
    require_version("transformers", _OLDEST, _BELOW)
    modeling = importlib.import_module("transformers.modeling_utils")
    loading = importlib.import_module("transformers.core_model_loading")
    generation = importlib.import_module("transformers.generation.utils")
    pipelines = importlib.import_module("transformers.pipelines.base")
    adapters = importlib.import_module("transformers.integrations.peft")

    # Any spelling of a device, checked before a config is read.
    check = require_function(modeling, "check_and_set_device_map", ["device_map"])
    yield Patch(modeling, "check_and_set_device_map", functools.partial(_check_device_map, check))
    # Budgets and planner.
    require_function(
        modeling, "_get_device_map", ["model", "device_map", "max_memory", "hf_quantizer"]
    )
    yield Patch(modeling, "_get_device_map", plan)
    # Files are mapped, so that a weight which stays on the host or the disk is not copied.
    load = require_function(
        modeling.PreTrainedModel,
        "_load_pretrained_model",
        ["model", "state_dict", "checkpoint_files", "load_config"],
    )
    yield Patch(
        modeling.PreTrainedModel,
        "_load_pretrained_model",
        staticmethod(functools.partial(_load, load)),
    )
    # Weights for the disk stay in their file, or go to anydevice's offload store.
    require_function(
        modeling, "accelerate_disk_offload", ["model", "disk_offload_folder", "checkpoint_files"]
    )
    yield Patch(modeling, "accelerate_disk_offload", _begin_disk)
    require_function(
        loading,
        "offload_and_maybe_resave_param",
        ["target_name", "param", "loading_info", "disk_offload_folder", "disk_offload_index"],
    )
    yield Patch(
        loading,
        "offload_and_maybe_resave_param",
        functools.partial(_put_on_disk, loading.set_param_for_module),
    )
    # Hooks.
    require_function(
        modeling,
        "accelerate_dispatch",
        ["model", "hf_quantizer", "device_map", "offload_folder", "offload_index"],
    )
    yield Patch(modeling, "accelerate_dispatch", _dispatch)
    # Names that transformers imports from accelerate, and uses on models with hooks.
    yield Patch(modeling, "add_hook_to_module", add_hook_to_module)
    yield Patch(modeling, "extract_model_from_parallel", extract_model_from_parallel)
    yield Patch(generation, "add_hook_to_module", add_hook_to_module)
    yield Patch(generation, "AlignDevicesHook", AlignDevicesHook)
    yield Patch(adapters, "dispatch_model", dispatch_model)
    yield Patch(adapters, "infer_auto_device_map", infer_auto_device_map)
    yield Patch(adapters, "get_balanced_memory", get_balanced_memory)
    # An ordinal means the first of the device types that pipelines know; ours may be none of them.
    init = require_function(pipelines.Pipeline, "__init__", ["self", "model"])
    yield Patch(pipelines.Pipeline, "__init__", _pipeline_init(init))
    # Modules that refuse to load a model where accelerate is not installed.
    gates = ("transformers.modeling_utils", "transformers.integrations.accelerate")
    for name, module in list(sys.modules.items()):
        gated = name.startswith("transformers.quantizers.") or name in gates
        if gated and "is_accelerate_available" in vars(module):
            yield Patch(module, "is_accelerate_available", _is_available)
    yield from peft.patches()


#: The switch; `anydevice.integrations.diffusers` holds it too.
integration = Integration(_patches)


# ---------------------------------------------------------------------- what takes their place


def _is_available(min_version: str = "") -> bool:
    return True


def _check_device_map(original: Callable[[Any], Any], device_map: Any) -> Any:
    return original(None) if device_map is None else read_device_map(device_map)


def _load(
    original: Callable[..., Any],
    model: Any,
    state_dict: Mapping[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: Any,
    *others: Any,
    **options: Any,
) -> Any:
    if peft.is_dispatched(model):  # an adapter is loaded: it is stored next to its base, in memory
        load_config = dataclasses.replace(load_config, device_map=_without_disk(model))
    mapped = load_config.device_map is not None and not load_config.disable_mmap
    if mapped and checkpoint_files and state_dict is None:
        state_dict, checkpoint_files = read_files(checkpoint_files), None
    return original(model, state_dict, checkpoint_files, load_config, *others, **options)


def _without_disk(model: Any) -> dict[str, str]:
    """The device map of a loaded model, as one for weights that are not stored on the disk."""
    devices = model.anydevice_placement.devices.entries()
    return {
        name: str(device.torch) if device.is_accelerator else "cpu"
        for name, device in devices.items()
    }


def _begin_disk(model: Any, folder: Any, *_: Any, **__: Any) -> DeferredWeights:
    return DeferredWeights(model, folder)


def _put_on_disk(
    set_param: Callable[..., None],
    target_name: str,
    param: Any,
    loading_info: Any,
    _folder: Any,
    weights: DeferredWeights,
    *_: Any,
) -> DeferredWeights:
    set_param(weights.model, target_name, param, loading_info, planned_for(weights.model).quantizer)
    weights.add(target_name)
    return weights


def _dispatch(
    model: Any,
    _quantizer: Any,
    _device_map: Any,
    offload_folder: Any,
    offload_index: Any,
    offload_buffers: bool = False,
) -> None:
    if isinstance(offload_index, DeferredWeights):
        offload_index.store()
    dispatch_model(
        model,
        planned_for(model).placement,
        offload_dir=offload_folder,
        offload_buffers=offload_buffers,
    )


def _pipeline_init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, model: Any, *args: Any, **options: Any) -> None:
        original(self, model, *args, **options)
        if getattr(model, "hf_device_map", None) is not None:
            self.device = model.device

    return init
