"""diffusers' own ``device_map`` and offloading, carried out by anydevice.

After `enable`, pipelines and models take ``device_map``, ``enable_model_cpu_offload``,
``enable_sequential_cpu_offload`` and group offloading to every device that has a backend, with
anydevice's planner and hooks. accelerate need not be installed. Components that are transformers'
models are loaded through `anydevice.integrations.transformers`, which is enabled too.

``ANYDEVICE_DIFFUSERS=1`` in the environment enables it when anydevice is imported.

[Note: what is replaced, and why]
diffusers takes names from accelerate where it finds it installed, and has no other extension point.
`_NAMES` lists each module's names: they are set to anydevice's, which has the same names. The
methods in `_IMPORTING` import accelerate when they are called, and find anydevice. The range of
versions is `_OLDEST` to `_BELOW`; a test compares the list with the source of diffusers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from anydevice import registry
from anydevice.devices import CPU, parse_device
from anydevice.dispatch import cpu_offload, disk_offload
from anydevice.errors import DiskFullError, OffloadStoreError, OptionError
from anydevice.integrations import transformers
from anydevice.integrations.patching import (
    Enabled,
    Integration,
    Patch,
    require_function,
    require_version,
)
from anydevice.integrations.stand_in import INTERFACE, package, standing_in

__all__ = ["disable", "enable", "integration"]

_OLDEST: Final = (0, 42)
_BELOW: Final = (0, 43)
_REMOVE: Final = ("AlignDevicesHook", "CpuOffload", "remove_hook_from_module")
_QUANTIZER: Final = (
    "accelerate",
    "init_empty_weights",
    "add_hook_to_module",
    "remove_hook_from_module",
)
#: Modules of diffusers, and the names that each takes from accelerate.
_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "hooks.group_offloading": ("AlignDevicesHook", "CpuOffload", "send_to_device"),
    "loaders.lora_base": _REMOVE,
    "loaders.single_file_model": ("dispatch_model", "init_empty_weights"),
    "loaders.single_file_utils": ("init_empty_weights",),
    "loaders.textual_inversion": _REMOVE,
    "models.model_loading_utils": (
        "infer_auto_device_map",
        "get_balanced_memory",
        "get_max_memory",
        "offload_weight",
        "set_module_tensor_to_device",
    ),
    "models.modeling_utils": (
        "accelerate",
        "dispatch_model",
        "load_offloaded_weights",
        "save_offload_index",
    ),
    "modular_pipelines.components_manager": (
        "add_hook_to_module",
        "remove_hook_from_module",
        "PartialState",
        "send_to_device",
        "clear_device_cache",
        "convert_file_size_to_int",
    ),
    "modular_pipelines.modular_pipeline": ("accelerate",),
    "pipelines.pipeline_loading_utils": (
        "accelerate",
        "dispatch_model",
        "remove_hook_from_module",
        "compute_module_sizes",
        "get_max_memory",
    ),
    "pipelines.pipeline_utils": ("accelerate",),
    "pipelines.stable_diffusion.convert_from_ckpt": (
        "init_empty_weights",
        "set_module_tensor_to_device",
    ),
    "quantizers.bfl.utils": _QUANTIZER,
    "quantizers.bitsandbytes.utils": _QUANTIZER,
    "quantizers.gguf.utils": _QUANTIZER,
    "quantizers.modelopt.modelopt_quantizer": ("set_module_tensor_to_device",),
    "quantizers.nunchaku.utils": ("init_empty_weights",),
    "quantizers.quanto.quanto_quantizer": ("set_module_tensor_to_device",),
    "quantizers.quanto.utils": ("init_empty_weights",),
    "training_utils": ("get_logger",),
    "utils.accelerate_utils": ("accelerate",),
}
#: More components than any pipeline has.
_COMPONENTS: Final = 32
#: Methods of pipelines that import accelerate when they are called.
_IMPORTING: Final = ("enable_model_cpu_offload", "enable_sequential_cpu_offload")


def enable() -> Enabled:
    """Let anydevice carry out diffusers' ``device_map`` and offloading.

    Calling it again changes nothing.

    Returns:
        A context manager; its end restores the state before.

    Raises:
        MissingDependencyError: diffusers or transformers is not installed, or not in a version that
            this is written for.

    Example:
        >>> from anydevice.integrations import diffusers
        >>> with diffusers.enable():
        ...     pass  # enable_model_cpu_offload() is anydevice's here
    """
    return integration.enable()


def disable() -> None:
    """Undo `enable`. Pipelines that are loaded already go on working."""
    integration.disable()


def _patches() -> Iterator[Patch]:
    require_version("diffusers", _OLDEST, _BELOW)
    imports = importlib.import_module("diffusers.utils.import_utils")
    modules = {name: _imported(name) for name in _NAMES}
    # Every `is_accelerate_available` and `is_accelerate_version` reads these two.
    yield Patch(imports, "_accelerate_available", True)
    yield Patch(imports, "_accelerate_version", INTERFACE)
    for path, module in modules.items():
        if module is None:
            continue
        for name in _NAMES[path]:
            yield Patch(module, name, _ours(name))
        # The accelerator to run on where the caller names none.
        if "get_device" in vars(module):
            yield Patch(module, "get_device", _device_type)
    pipelines = importlib.import_module("diffusers.pipelines.pipeline_utils")
    for owner in _with_subclasses(pipelines.DiffusionPipeline):
        for name in _IMPORTING:
            if name in vars(owner):
                method = require_function(owner, name, ["self", "gpu_id", "device"])
                yield Patch(owner, name, _in_stand_in(method))
    # Where more than one component does not fit, all of them are offloaded, not the last one only.
    loading = importlib.import_module("diffusers.pipelines.pipeline_loading_utils")
    require_function(loading, "_assign_components_to_devices", ["module_sizes", "device_memory"])
    yield Patch(loading, "_assign_components_to_devices", _assign)
    # diffusers exchanges a tensor's data with another device's, which torch refuses for devices
    # that it does not know itself.
    groups = importlib.import_module("diffusers.hooks.group_offloading")
    require_function(groups, "_apply_group_offloading", ["module", "config"])
    yield Patch(groups, "_apply_group_offloading", _offload_groups)


def _needed() -> list[Integration]:
    installed = importlib.util.find_spec("transformers") is not None
    return [transformers.integration] if installed else []


integration = Integration(_patches, _needed)


def _imported(name: str) -> ModuleType | None:
    """A module of diffusers; None for a quantizer whose package is not installed."""
    try:
        return importlib.import_module(f"diffusers.{name}")
    except ImportError:
        if name.startswith("quantizers."):
            return None
        raise


def _ours(name: str) -> Any:
    """What anydevice has under a name of accelerate's."""
    if name == "accelerate":
        return package()
    for home in ("anydevice", "anydevice.hooks", "anydevice.utils", "anydevice.state"):
        module = importlib.import_module(home)
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(name)


def _device_type() -> str:
    """The type of the first accelerator, or the host's."""
    return registry.primary_type() or CPU.type


def _with_subclasses(owner: Any) -> Iterator[Any]:
    yield owner
    for subclass in owner.__subclasses__():
        yield from _with_subclasses(subclass)


def _in_stand_in(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **options: Any) -> Any:
        with standing_in():
            return method(*args, **options)

    return run


def _assign(
    module_sizes: Mapping[str, float], device_memory: Mapping[Any, float], *_: Any, **__: Any
) -> dict[Any, list[str]]:
    """Give each component, the largest first, to the device that has the most memory left."""
    left = dict(device_memory)
    given: dict[Any, list[str]] = {}
    for component, size in module_sizes.items():
        device = max(left, key=lambda candidate: left[candidate])
        if size > left[device]:
            device = "cpu"
        else:
            left[device] -= size
        given.setdefault(device, []).append(component)
    return given


def _offload_groups(module: Any, config: Any) -> None:
    """Keep a model on the host or the disk, and load its blocks one after another."""
    if parse_device(config.offload_device) != CPU:
        raise OptionError(
            f"offload_device={str(config.offload_device)!r}: groups are offloaded to the host "
            "('cpu'), or to files where offload_to_disk_path is given"
        )
    if config.offload_to_disk_path is None:
        cpu_offload(module, config.onload_device)
    else:
        _offload_to_folder(module, config.offload_to_disk_path, config.onload_device)


def _offload_to_folder(module: Any, folder: str, device: Any) -> None:
    """Offload a component to ``folder``, or within it where that holds another component."""
    for number in range(_COMPONENTS):
        own = Path(folder) / f"{type(module).__name__}-{number}" if number else Path(folder)
        try:
            disk_offload(module, own, device)
        except DiskFullError:
            raise
        except OffloadStoreError:
            if not own.exists() or number + 1 == _COMPONENTS:
                raise
        else:
            return
