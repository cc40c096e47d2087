"""What a process knows of itself and of the others."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.errors import OptionError, ProcessGroupError
from anydevice.processes.exchange import Exchange
from anydevice.processes.kinds import DistributedType
from anydevice.processes.selecting import Function, only
from anydevice.processes.splitting import split
from anydevice.processes.start import HOST, start

__all__ = ["PartialState", "wait_for_everyone"]


class PartialState:
    """A process among those that were started together: its rank, its device, the group.

    The first one made reads the environment (torchrun's, SLURM's or MPI's; none: alone), chooses
    this process's device, makes it the current one, and forms the process group. All others share
    its state. On the host several processes work together as on any device.

    Args:
        cpu: use the host, though there is an accelerator.
        backend: the name of the device's collectives, instead of what its backend names.
        timeout: how long to wait for other processes, at the start and at each collective.
        init_method: where the processes meet, instead of the environment's address.

    Attributes:
        device: this process's `torch.device`.
        process_index: this process's rank, from 0.
        num_processes: how many processes there are.
        local_process_index: the rank among the processes of this machine.
        local_num_processes: how many this machine runs.
        distributed_type: a `DistributedType`.
        backend: the name of the device's collectives; None when alone.
        device_backend: the `DeviceBackend` of the device.
        debug: whether ``ACCELERATE_DEBUG_MODE`` is set.

    Raises:
        ProcessGroupError: the environment contradicts itself, or asks for processes that do not
            come.
        UnknownDeviceError: there is no device for this process.
        OptionError: several processes are asked for on a device without collectives; or this call
            contradicts the first one.

    Example:
        >>> from anydevice import PartialState
        >>> state = PartialState(cpu=True)
        >>> state.process_index, state.num_processes, state.device.type
        (0, 1, 'cpu')
        >>> with state.split_between_processes([1, 2, 3]) as part:
        ...     state.print(part)
        [1, 2, 3]
    """

    #: What all instances share. A test may put another dict in its place.
    _shared_state: ClassVar[dict[str, Any]] = {}

    device: torch.device
    process_index: int
    num_processes: int
    local_process_index: int
    local_num_processes: int
    distributed_type: DistributedType
    backend: str | None
    device_backend: DeviceBackend
    debug: bool
    fork_launched: bool
    _exchange: Exchange | None

    def __init__(
        self,
        cpu: bool = False,
        *,
        backend: str | None = None,
        timeout: datetime.timedelta | None = None,
        init_method: str | None = None,
    ) -> None:
        self.__dict__ = self._shared_state
        if not self.initialized:
            # Nothing is kept of a start that fails.
            self._shared_state.update(start(cpu, backend, timeout, init_method))
        elif cpu and self.device.type != HOST:
            raise OptionError(
                f"PartialState(cpu=True), but this process works on {self.device} since the first "
                "PartialState() or Accelerator(): say cpu=True there"
            )

    def __repr__(self) -> str:
        return (
            f"Distributed environment: {self.distributed_type}"
            f"{f'  Backend: {self.backend}' if self.backend else ''}\n"
            f"Num processes: {self.num_processes}\n"
            f"Process index: {self.process_index}\n"
            f"Local process index: {self.local_process_index}\n"
            f"Device: {self.device}\n"
        )

    def __reduce__(self) -> Any:
        """Of a copy, and of what another process reads, the state is that process's own."""
        return _this_process, (type(self),)

    @classmethod
    def _reset_state(cls) -> None:
        """Clear the state, so that the next instance starts again. The process group goes on."""
        cls._shared_state.clear()

    @property
    def initialized(self) -> bool:
        """Whether some `PartialState` has been made."""
        return bool(self._shared_state)

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.num_processes > 1

    @property
    def default_device(self) -> torch.device:
        """The first accelerator of this machine, or the host."""
        kind = registry.primary_type()
        return torch.device(HOST) if kind is None else registry.get_backend(kind).device(0)

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0."""
        return self.process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the process with the highest rank."""
        return self.process_index == self.num_processes - 1

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.local_process_index == 0

    def wait_for_everyone(self) -> None:
        """Wait until all processes are here.

        Raises:
            MissingRankError: one did not come in time, has ended or died.
            CollectiveMismatchError: one makes another call.
        """
        self.meet("wait_for_everyone")

    def meet(
        self, call: str, description: Any = None, payload: bytes = b"", hint: str = ""
    ) -> list[bytes]:
        """See that all ranks are about to do the same; see `Exchange.meet`. Nothing when alone."""
        if self._exchange is None:
            return [payload]
        return self._exchange.meet(call, description, payload, hint)

    def gather_bytes(self, call: str, description: Any, data: torch.Tensor) -> torch.Tensor:
        """`meet`, and all ranks' bytes of the host, a row for each; see `Exchange.gather`."""
        if self._exchange is None:
            return data[None]
        return self._exchange.gather(call, description, data)

    @contextlib.contextmanager
    def collective(self, call: str) -> Iterator[None]:
        """Have an error of ``torch.distributed`` in the context name each rank's line.

        Raises:
            ProcessGroupError: the collective failed, such as for a rank that died in it.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            lines = "" if self._exchange is None else f"\n{self._exchange.lines()}"
            raise ProcessGroupError(
                f"{call} failed on rank {self.process_index} of {self.num_processes}: {error}"
                f"{lines}"
            ) from error

    @contextlib.contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Have process 0 run the context's body before all others."""
        with self._first(self.is_main_process):
            yield

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Have process 0 of each machine run the context's body before the others."""
        with self._first(self.is_local_main_process):
            yield

    @contextlib.contextmanager
    def _first(self, goes_first: bool) -> Iterator[None]:
        # One name for both: where one stands in the other, ranks leave and enter in other orders.
        if not goes_first:
            self.meet("main_process_first")
        try:
            yield
        finally:  # also where the body fails: the others wait
            if goes_first:
                self.meet("main_process_first")

    @contextlib.contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of ``inputs`` for the context.

        Args:
            inputs: a list, tuple, tensor or array, or a mapping of equally long ones; the same
                on each process.
            apply_padding: repeat the last item until all shares are equally long, as `gather`
                needs it.

        Raises:
            OptionError: the data cannot be divided.
        """
        yield split(inputs, self.process_index, self.num_processes, apply_padding=apply_padding)

    # ------------------------------------------------------------------ on some processes only

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on process 0 of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function so that only process 0 runs it; elsewhere it returns None."""
        return only(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Function | None = None) -> Any:
        """Decorate a function so that only process 0 of each machine runs it."""
        return only(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Function | None = None) -> Any:
        """Decorate a function so that only the process with the highest rank runs it."""
        return only(lambda: self.is_last_process, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Any:
        """Decorate a function so that only one process runs it.

        Raises:
            OptionError: there is no such process.
        """
        self._need_rank("process_index", process_index, self.num_processes)
        return only(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Function | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function so that only one process of each machine runs it.

        Raises:
            OptionError: there is no such process.
        """
        self._need_rank("local_process_index", local_process_index, self.local_num_processes)
        return only(lambda: self.local_process_index == local_process_index, function)

    def _need_rank(self, name: str, rank: int | None, size: int) -> None:
        if rank is None or not 0 <= rank < size:
            raise OptionError(f"{name}={rank}: give a rank from 0 to {size - 1}")

    def set_device(self) -> None:
        """Make this process's device the current one of the calling thread."""
        if self.device.index is not None:
            self.device_backend.set_device(self.device.index)

    def destroy_process_group(self, group: Any = None) -> None:
        """End the process group, or ``group`` alone. Nothing when there is none."""
        if group is not None:
            dist.destroy_process_group(group)
            return
        if self._exchange is not None:
            self._exchange.leave()
            self._exchange = None
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def _this_process(kind: type[PartialState]) -> PartialState:
    made = object.__new__(kind)
    made.__dict__ = kind._shared_state
    return made


def wait_for_everyone() -> None:
    """Wait until all processes are here; see `PartialState.wait_for_everyone`.

    Example:
        >>> from anydevice.utils import wait_for_everyone
        >>> wait_for_everyone()  # one process: returns at once
    """
    PartialState().wait_for_everyone()
