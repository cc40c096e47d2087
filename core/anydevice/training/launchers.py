"""Starting processes from a notebook or a test: they are spawned, never forked.

A forked process has a copy of this one's threads' locks and of a device's runtime, and neither
works there. A spawned one imports the function again, so it must stand in a file, or be one that
can be sent as it is.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

from anydevice import registry
from anydevice.errors import OptionError
from anydevice.processes import PartialState

__all__ = ["debug_launcher", "notebook_launcher"]


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: dict[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> None:
    """Run ``function(*args)`` in several processes, from a notebook or a program.

    Args:
        function: trains; it makes its `Accelerator` itself. At the top level of a file, or of the
            notebook.
        args: its arguments.
        num_processes: on this machine; None means one for each accelerator, or one.
        mixed_precision: "no", "fp16" or "bf16".
        use_port: of the main process; "0" is a free one, on one machine.
        master_addr: of the machine of the main process.
        node_rank: number of this machine.
        num_nodes: how many machines there are.
        rdzv_backend: how torchrun's agents meet.
        rdzv_endpoint: where they do; None is the main process's address.
        rdzv_conf: more choices about that.
        rdzv_id: a name for the run.
        max_restarts: how often all processes start again after one has failed.
        monitor_interval: in seconds.
        log_line_prefix_template: of lines that processes print.

    Raises:
        OptionError: fewer than one process, or an `Accelerator` was made here already, so that
            this process holds the device.

    Example:
        >>> from anydevice import notebook_launcher
        >>> def work():
        ...     print("training")
        >>> notebook_launcher(work, num_processes=1)
        training
    """
    count = num_processes if num_processes is not None else _accelerators()
    if count < 1 or num_nodes < 1 or not 0 <= node_rank < num_nodes:
        raise OptionError(
            f"num_processes={count}, num_nodes={num_nodes}, node_rank={node_rank}: give numbers "
            "from 1, and a node_rank below num_nodes"
        )
    if PartialState._shared_state:
        raise OptionError(
            "an Accelerator was made in this process, which the ones to be started would have to "
            "share devices with. Make it inside the function only, and restart the notebook"
        )
    if count * num_nodes == 1:
        _run_here(function, args, mixed_precision)
        return
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    port = _free_port() if str(use_port) == "0" else int(use_port)
    static = rdzv_backend == "static"
    options: dict[str, Any] = {
        "min_nodes": num_nodes,
        "max_nodes": num_nodes,
        "nproc_per_node": count,
        "run_id": rdzv_id,
        "rdzv_endpoint": rdzv_endpoint or f"{master_addr}:{port}",
        "rdzv_backend": rdzv_backend,
        "rdzv_configs": {**({"rank": node_rank} if static else {}), **(rdzv_conf or {})},
        "monitor_interval": monitor_interval,
        "max_restarts": max_restarts,
        "start_method": "spawn",
    }
    if log_line_prefix_template is not None:
        options["log_line_prefix_template"] = log_line_prefix_template
    elastic_launch(LaunchConfig(**options), _run_there)(function, tuple(args), mixed_precision)


def debug_launcher(
    function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2
) -> None:
    """Run ``function(*args)`` in several processes on the host, to try a loop without devices.

    Args:
        function: at the top level of a file.
        args: its arguments.
        num_processes: how many.

    Raises:
        OptionError: fewer than one process.
        ProcessRaisedException: the function raised in one of them; its traceback is shown.

    Example:
        >>> from anydevice import debug_launcher
        >>> debug_launcher(print, ("training",), num_processes=2)  # each process prints
    """
    if num_processes < 1:
        raise OptionError(f"num_processes={num_processes}: give a number from 1")
    from torch.multiprocessing.spawn import spawn

    spawn(  # type: ignore[no-untyped-call]
        _run_on_host, (function, tuple(args), num_processes, _free_port()), num_processes
    )


def _run_on_host(
    rank: int, function: Callable[..., Any], args: Sequence[Any], count: int, port: int
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        ACCELERATE_USE_CPU="true",
    )
    _finish(function, args)


def _run_there(function: Callable[..., Any], args: Sequence[Any], precision: str) -> None:
    os.environ.setdefault("ACCELERATE_MIXED_PRECISION", precision)
    _finish(function, args)


def _finish(function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Run the function in a process of its own, whose environment this may change."""
    function(*args)
    if PartialState._shared_state:
        PartialState().destroy_process_group()


def _run_here(function: Callable[..., Any], args: Sequence[Any], precision: str) -> None:
    before = os.environ.get("ACCELERATE_MIXED_PRECISION")
    os.environ["ACCELERATE_MIXED_PRECISION"] = before or precision
    try:
        function(*args)
    finally:
        if before is None:
            del os.environ["ACCELERATE_MIXED_PRECISION"]


def _accelerators() -> int:
    kind = registry.primary_type()
    return max(1, registry.get_backend(kind).device_count()) if kind is not None else 1


def _free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return int(place.getsockname()[1])
