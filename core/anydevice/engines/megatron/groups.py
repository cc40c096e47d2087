"""Megatron's groups of processes."""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from anydevice.engines.megatron.device import MegatronDevice
from anydevice.engines.megatron.options import MegatronLMPlugin
from anydevice.errors import OptionError

__all__ = ["divide_processes", "start_groups"]

#: Which processes are neighbours: those that work on one batch.
_ORDER: Final = "tp-cp-ep-pp-dp"
#: The processes, how they are divided, and the mesh of that: Megatron has one division at once.
_divided: list[tuple[Any, tuple[int, int, int], Any]] = []


def divide_processes(plugin: MegatronLMPlugin, processes: int) -> tuple[int, int, int]:
    """How many groups have data of their own, how many stages each has, and processes a stage.

    Raises:
        OptionError: degrees that do not fit, or a process that was started alone.

    Example:
        >>> from anydevice import MegatronLMPlugin
        >>> divide_processes(MegatronLMPlugin(tp_degree=2), 1)
        Traceback (most recent call last):
        anydevice.errors.OptionError: MegatronLMPlugin trains in a process group, ...
    """
    tensor, stages = plugin.tp_degree or 1, plugin.pp_degree or 1
    if not torch.distributed.is_initialized():
        raise OptionError(
            "MegatronLMPlugin trains in a process group, and this process was started alone. "
            "Start it with `anydevice launch` or torchrun (one process is enough), or leave the "
            "plugin out"
        )
    if processes % (tensor * stages):
        raise OptionError(
            f"MegatronLMPlugin(tp_degree={tensor}, pp_degree={stages}) needs a multiple of "
            f"{tensor * stages} processes, and there are {processes}: start as many, or give "
            "other degrees"
        )
    return processes // (tensor * stages), stages, tensor


def start_groups(here: MegatronDevice, sizes: tuple[int, int, int]) -> Any:
    """Make Megatron's groups, unless they are there, and the mesh that loaders divide data by.

    Args:
        here: the device.
        sizes: what `divide_processes` found.

    Returns:
        A `DeviceMesh` with the dimensions "dp_replicate", "pp" and "tp".
    """
    state: Any = importlib.import_module("megatron.core.parallel_state")
    distributed: Any = torch.distributed
    world = distributed.group.WORLD
    if not _divided or _divided[0][0] is not world or _divided[0][1] != sizes:
        if state.model_parallel_is_initialized():
            state.destroy_model_parallel()
        with here.working():
            state.initialize_model_parallel(
                sizes[2], sizes[1], order=_ORDER, create_gloo_process_groups=False
            )
        names = ("dp_replicate", "pp", "tp")
        mesh = distributed.init_device_mesh(here.device.type, sizes, mesh_dim_names=names)
        _divided[:] = [(world, sizes, mesh)]
    with here.working():
        here.seed(torch.initial_seed() % 2**31, state.get_tensor_model_parallel_rank())
    return _divided[0][2]
