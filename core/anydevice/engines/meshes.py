"""Processes in a mesh: which of them replicate, shard data, or divide a model's tensors."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from anydevice.arguments import names_unknown_arguments
from anydevice.errors import OptionError
from anydevice.text import whole_number

__all__ = [
    "ParallelismConfig",
    "PipelineParallelConfig",
    "TorchTensorParallelConfig",
    "TorchTensorParallelPlugin",
    "mesh_of",
]

_SIZES: Final = {
    "dp_replicate": "dp_replicate_size",
    "dp_shard": "dp_shard_size",
    "tp": "tp_size",
    "pp": "pp_size",
}


@names_unknown_arguments
@dataclass
class TorchTensorParallelConfig:
    """Choices for tensor parallelism.

    Args:
        enable_async_tp: not there.

    Raises:
        OptionError: ``enable_async_tp``.

    Example:
        >>> from anydevice.utils import TorchTensorParallelConfig
        >>> TorchTensorParallelConfig().enable_async_tp
        False
    """

    enable_async_tp: bool = False

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise OptionError("enable_async_tp=True is not there: leave it out")


@names_unknown_arguments
@dataclass
class TorchTensorParallelPlugin:
    """The old way to ask for tensor parallelism; `ParallelismConfig` says more.

    Args:
        tp_size: processes that compute each layer together.
        torch_device_mesh: not there: the mesh follows from the size.

    Raises:
        OptionError: a mesh was given.

    Example:
        >>> from anydevice.utils import TorchTensorParallelPlugin
        >>> TorchTensorParallelPlugin(tp_size=2).tp_size
        2
    """

    tp_size: int = 1
    torch_device_mesh: Any = None

    def __post_init__(self) -> None:
        if self.torch_device_mesh is not None:
            raise OptionError("torch_device_mesh: use ParallelismConfig(tp_size=...) instead")


@names_unknown_arguments
@dataclass
class PipelineParallelConfig:
    """Choices for training in a pipeline.

    Args:
        microbatches: how many parts each batch is divided into; None takes one for each stage.
        schedule: "1f1b" (each stage goes backward as soon as it can, and holds the activations of
            few microbatches), or "gpipe" (all forwards first), which is also taken where there are
            fewer microbatches than stages.
        example_inputs: what the model's forward takes: a tensor, a tuple, or a dict of keyword
            arguments; only shapes matter. By default some are made for a transformers model. The
            model is run once on meta with them, to see where it can be cut.

    Raises:
        OptionError: a number below one, or an unknown schedule.

    Example:
        >>> from anydevice.utils import PipelineParallelConfig
        >>> PipelineParallelConfig(microbatches=8).schedule
        '1f1b'
    """

    microbatches: int | None = None
    schedule: str = "1f1b"
    example_inputs: Any = None

    def __post_init__(self) -> None:
        if self.microbatches is not None:
            whole_number("microbatches", self.microbatches, 1, "a number of parts of a batch")
        if self.schedule not in ("1f1b", "gpipe"):
            raise OptionError(f"schedule={self.schedule!r}: give '1f1b' or 'gpipe'")


@names_unknown_arguments
@dataclass
class ParallelismConfig:
    """How the processes divide the work, as the sizes of a mesh; their product is their number.

    Args:
        dp_replicate_size: groups that each hold all weights, and average gradients.
        dp_shard_size: processes over which weights are sharded (`fully_shard`).
        tp_size: processes that compute each layer together, by the model's own plan.
        cp_size, cp_backend, cp_handler: context parallelism, which is not there.
        sp_size, sp_backend, sp_handler: sequence parallelism, which is DeepSpeed's own.
        tp_handler: choices for tensor parallelism.
        pp_size: processes that each hold some of the model's blocks (a pipeline).
        pp_handler: choices for the pipeline.

    Raises:
        OptionError: a size below one, or a kind of parallelism that is not there.

    Example:
        >>> from anydevice import ParallelismConfig
        >>> ParallelismConfig(dp_shard_size=2, tp_size=2).total_size
        4
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str | None = None
    sp_size: int | None = None
    sp_backend: str | None = None
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: Any = None
    sp_handler: Any = None
    pp_size: int | None = field(default=None, kw_only=True)
    pp_handler: PipelineParallelConfig | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in (*_SIZES.values(), "cp_size", "sp_size"):
            size = getattr(self, name)
            if size is None:
                size = int(os.environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
                setattr(self, name, size)
            if not isinstance(size, int) or size < 1:
                raise OptionError(f"{name}={size!r}: give a number of processes, from 1")
        for kind, instead in (
            ("cp", "use tp_size or dp_shard_size"),
            ("sp", "it is DeepSpeed's own: use a DeepSpeedPlugin"),
        ):
            given = [
                name
                for name in (f"{kind}_size", f"{kind}_backend", f"{kind}_handler")
                if getattr(self, name) not in (None, 1)
            ]
            if given:
                raise OptionError(
                    f"ParallelismConfig({given[0]}={getattr(self, given[0])!r}) is not there: "
                    f"{instead}"
                )

    def __repr__(self) -> str:
        sizes = ", ".join(f"{field}={getattr(self, field)}" for field in _SIZES.values())
        return f"ParallelismConfig({sizes})"

    @property
    def total_size(self) -> int:
        """How many processes that takes."""
        size = 1
        for name in _SIZES.values():
            size *= getattr(self, name)
        return size

    @property
    def data_parallel_size(self) -> int:
        """Among how many groups of processes the data is divided."""
        return (self.dp_replicate_size or 1) * (self.dp_shard_size or 1)

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes work on one batch together."""
        return (self.tp_size or 1) * (self.pp_size or 1)

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are divided."""
        return (self.tp_size or 1) > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether blocks are divided."""
        return (self.pp_size or 1) > 1

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether weights are replicated."""
        return (self.dp_replicate_size or 1) > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether weights are sharded."""
        return (self.dp_shard_size or 1) > 1

    @property
    def cp_enabled(self) -> bool:
        """False: sequences are not divided."""
        return False

    @property
    def sp_enabled(self) -> bool:
        """False: sequences are not divided."""
        return False

    @property
    def active_mesh_dims(self) -> list[str]:
        """Names of the mesh's dimensions that are larger than one."""
        return [name for name, field in _SIZES.items() if getattr(self, field) > 1]

    def build_device_mesh(self, device_type: str) -> Any:
        """The mesh of all processes; None where no dimension is larger than one.

        Raises:
            OptionError: there are more processes, or fewer.
        """
        from torch.distributed.device_mesh import init_device_mesh

        count = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if count != self.total_size:
            raise OptionError(
                f"{self!r} is for {self.total_size} processes, and there are {count}: start "
                f"{self.total_size}, or choose sizes whose product is {count}"
            )
        names = tuple(self.active_mesh_dims)
        if not names:
            return None
        sizes = tuple(getattr(self, _SIZES[name]) for name in names)
        return init_device_mesh(device_type, sizes, mesh_dim_names=names)


def mesh_of(setup: Any, hybrid: bool = False) -> Any:
    """The mesh over which weights are sharded: of one dimension, or replicated and sharded.

    Raises:
        OptionError: what is hybrid needs processes on several machines.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind, count = setup.state.device.type, setup.state.num_processes
    if setup.mesh is not None:
        have = setup.mesh.mesh_dim_names
        names = tuple(name for name in ("dp_replicate", "dp_shard") if name in have)
        if names:
            return setup.mesh[names] if len(names) > 1 else setup.mesh[names[0]]
        raise OptionError(
            f"the mesh has no dimension to shard over, only {', '.join(have)}: give dp_shard_size"
        )
    if not hybrid:
        return init_device_mesh(kind, (count,), mesh_dim_names=("dp_shard",))
    here = setup.state.local_num_processes
    if count % here or count == here:
        raise OptionError(
            "sharding_strategy='HYBRID_SHARD' replicates across machines, and there is one. Give "
            "ParallelismConfig(dp_replicate_size=..., dp_shard_size=...) instead"
        )
    return init_device_mesh(
        kind, (count // here, here), mesh_dim_names=("dp_replicate", "dp_shard")
    )
