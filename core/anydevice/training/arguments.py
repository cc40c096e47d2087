"""The checks of an `Accelerator`'s arguments that look at one argument alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, get_args

from anydevice.data import DataLoaderConfiguration
from anydevice.engines import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    TorchTensorParallelPlugin,
)
from anydevice.errors import OptionError
from anydevice.processes import RNGType
from anydevice.training.compiling import TorchDynamoPlugin
from anydevice.training.gradients import GradientAccumulationPlugin
from anydevice.training.project import ProjectConfiguration
from anydevice.training.scheduler import SchedulerUnit

__all__ = ["check_arguments", "kind_of"]

_OBJECTS: Final[Mapping[str, type]] = {
    "dataloader_config": DataLoaderConfiguration,
    "deepspeed_plugin": DeepSpeedPlugin,
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "torch_tp_plugin": TorchTensorParallelPlugin,
    "project_config": ProjectConfiguration,
    "gradient_accumulation_plugin": GradientAccumulationPlugin,
    "dynamo_plugin": TorchDynamoPlugin,
    "parallelism_config": ParallelismConfig,
}
_FLAGS: Final = ("device_placement", "split_batches", "cpu", "step_scheduler_with_optimizer")


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse what has the wrong kind, before a process group is made.

    Args:
        given: arguments of `Accelerator` by their names.

    Raises:
        OptionError: names the argument, what it is, and what to give.
    """
    for name, kind in _OBJECTS.items():
        value = given[name]
        if value is not None and not isinstance(value, kind):
            raise OptionError(f"{name} is a {kind_of(value)}: give a {_public(kind)}")
    for name in _FLAGS:
        if isinstance(given[name], str):
            raise OptionError(f"{name}={given[name]!r}: give True or False")
    units = get_args(SchedulerUnit)
    if given["scheduler_unit"] not in units:
        words = " or ".join(map(repr, units))
        raise OptionError(f"scheduler_unit={given['scheduler_unit']!r}: give {words}")
    if not isinstance(given["project_dir"], str | os.PathLike | None):
        raise OptionError(f"project_dir={given['project_dir']!r}: give the path of a folder")
    for rng_type in given["rng_types"] or ():
        try:
            RNGType(rng_type)
        except ValueError:
            raise OptionError(
                f"rng_types: {rng_type!r} is none of 'torch', 'generator' and the device types"
            ) from None


def kind_of(value: Any) -> str:
    """The class of a value, with its package where that is another one's."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package in ("builtins", "anydevice") else _full(kind)


def _full(kind: type) -> str:
    return f"{kind.__module__}.{kind.__name__}"


def _public(kind: type) -> str:
    return f"anydevice.utils.{kind.__name__}"
