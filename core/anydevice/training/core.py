"""What the parts of `Accelerator` share: this process, its collectives, who runs what."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from anydevice import collectives
from anydevice.engines import Engine
from anydevice.processes import DistributedType
from anydevice.training.gradients import GradientState
from anydevice.training.metrics import gather_for_metrics
from anydevice.training.scaling import LossScaler
from anydevice.training.state import AcceleratorState

__all__ = ["AcceleratorCore"]


class AcceleratorCore:
    """The process's side of an `Accelerator`."""

    state: AcceleratorState
    gradient_state: GradientState
    engine: Engine
    _loss_scaler: LossScaler | None
    _models: list[torch.nn.Module]
    _optimizers: list[Any]
    _schedulers: list[Any]
    _dataloaders: list[Any]
    _custom_objects: list[Any]

    def _finish_weighing(self) -> None:
        """Divide the gradients by the items that were counted for them; before each step."""

    # ------------------------------------------------------------------ who and where

    @property
    def device(self) -> torch.device:
        """The process's device."""
        device: torch.device = self.state.device
        return device

    @property
    def distributed_type(self) -> DistributedType:
        """How the processes work together."""
        return self.state.distributed_type

    @property
    def num_processes(self) -> int:
        """How many processes there are."""
        return int(self.state.num_processes)

    @property
    def process_index(self) -> int:
        """The process's rank, from 0."""
        return int(self.state.process_index)

    @property
    def local_process_index(self) -> int:
        """The rank among the processes of this machine."""
        return int(self.state.local_process_index)

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def mixed_precision(self) -> str:
        """The precision in which models compute: "no", "fp16" or "bf16"."""
        return self.state.mixed_precision

    @property
    def native_amp(self) -> bool:
        """Whether models compute in lower precision."""
        return self.mixed_precision != "no"

    @property
    def torch_device_mesh(self) -> Any:
        """The processes as a `DeviceMesh`; None where all do the same."""
        return self.state.device_mesh

    @property
    def parallelism_config(self) -> Any:
        """The `ParallelismConfig`; None where none was given."""
        return self.state.parallelism_config

    @property
    def is_fsdp2(self) -> bool:
        """Whether weights are sharded."""
        return self.state.is_fsdp2

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether weights are sharded or layers divided."""
        return self.engine.sharded

    @property
    def multi_device(self) -> bool:
        """Whether several processes each have the whole model."""
        return self.use_distributed and not self.engine.sharded

    def _mesh_rank(self, *names: str) -> int:
        mesh = self.torch_device_mesh
        rank = 0
        for name in names:
            if mesh is not None and name in mesh.mesh_dim_names:
                rank = rank * mesh[name].size() + mesh.get_local_rank(name)
        return rank

    @property
    def tensor_parallel_rank(self) -> int:
        """The place among the processes that compute each layer together."""
        return self._mesh_rank("tp")

    @property
    def data_parallel_rank(self) -> int:
        """Which part of the data is this process's."""
        mesh = self.torch_device_mesh
        return self.process_index if mesh is None else self._mesh_rank("dp_replicate", "dp_shard")

    @property
    def data_parallel_shard_rank(self) -> int:
        """The place among the processes over which weights are sharded."""
        return self._mesh_rank("dp_shard")

    @property
    def pipeline_parallel_rank(self) -> int:
        """The place in the pipeline; 0 where there is none."""
        return self._mesh_rank("pp")

    @property
    def context_parallel_rank(self) -> int:
        """0: sequences are not divided."""
        return 0

    # ------------------------------------------------------------------ some processes only

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on process 0 of each machine."""
        self.state.print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only process 0 runs it."""
        return self.state.on_main_process(function)

    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Decorate a function so that only process 0 of each machine runs it."""
        return self.state.on_local_main_process(function)

    def on_last_process(self, function: Callable[..., Any]) -> Any:
        """Decorate a function so that only the process with the highest rank runs it."""
        return self.state.on_last_process(function)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Any:
        """Decorate a function so that only one process runs it."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function so that only one process of each machine runs it."""
        return self.state.on_local_process(function, local_process_index)

    def main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Have process 0 run the context's body before all others."""
        first: contextlib.AbstractContextManager[None] = self.state.main_process_first()
        return first

    def local_main_process_first(self) -> contextlib.AbstractContextManager[None]:
        """Have process 0 of each machine run the context's body before the others."""
        first: contextlib.AbstractContextManager[None] = self.state.local_main_process_first()
        return first

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here."""
        self.state.wait_for_everyone()

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> contextlib.AbstractContextManager[Any]:
        """Give each process its share of ``inputs`` for the context."""
        share: contextlib.AbstractContextManager[Any] = self.state.split_between_processes(
            inputs, apply_padding=apply_padding
        )
        return share

    # ------------------------------------------------------------------ data of all processes

    def gather(self, tensor: Any) -> Any:
        """Concatenate each tensor over all processes; see `anydevice.utils.gather`."""
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`, without the samples that a prepared loader repeated to be even.

        Args:
            input_data: of the batch that is out; tensors whose first dimension is the batch's, in
                nested data, or objects.
            use_gather_object: pickle and collect objects.

        Example:
            >>> from anydevice import Accelerator
            >>> Accelerator(cpu=True).gather_for_metrics(torch.tensor([1, 2]))
            tensor([1, 2])
        """
        return gather_for_metrics(self.state._partial, input_data, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine each tensor over all processes; see `anydevice.utils.reduce`."""
        return collectives.reduce(tensor, reduction, scale)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """Make tensors as long as the longest process's; see `pad_across_processes` in utils."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)
