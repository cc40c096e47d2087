"""Forming the process group: every process that was asked for, or an error that names the missing.

The group has the device's collectives and always the host's next to them, since objects and
checkpoints travel there.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import time
from typing import Any, Final

import torch.distributed as dist

from anydevice.backend import DeviceBackend
from anydevice.errors import BackendError, MissingRankError, OptionError, ProcessGroupError
from anydevice.processes.environment import Launch

__all__ = ["collective_backends", "join_group"]

#: What torch's own type hints do not show of it.
_c10d: Any = dist
#: How long to wait for the others to start: on one machine, and on several.
_JOIN_LIMITS: Final = (datetime.timedelta(minutes=2), datetime.timedelta(minutes=10))
_HOST: Final = "cpu"
#: The key of the store under which a rank says why its collectives do not start.
_FAILED: Final = "failed"


def collective_backends(backend: DeviceBackend, name: str | None = None) -> str:
    """The name of a process group's collectives that serve a device and the host.

    Args:
        backend: of the device.
        name: of the device's collectives, instead of what the backend names.

    Returns:
        Such as ``"cpu:gloo"`` or ``"foo:fooccl,cpu:gloo"``, as `init_process_group` takes it.

    Raises:
        BackendError: it claims collectives, and neither it nor torch has a name for them.
        OptionError: the device has no collectives.
    """
    kind = backend.device_type
    host = f"{_HOST}:gloo"
    if name is not None and ":" in name:
        return name if f"{_HOST}:" in name else f"{name},{host}"
    if kind == _HOST:
        return f"{_HOST}:{name}" if name else host
    if not backend.capabilities.collectives:
        raise OptionError(
            f"device type {kind!r} has no collectives (its backend does not claim them), so "
            "several processes cannot work together on it. Use one process, or the host: "
            "PartialState(cpu=True)."
        )
    name = name or backend.collective_backend
    if name is None:
        try:
            name = dist.get_default_backend_for_device(kind)
        except (ValueError, RuntimeError, AttributeError) as error:
            raise BackendError(
                f"the backend for {kind!r} claims collectives, and neither it "
                f"(collective_backend) nor torch names them: {error}"
            ) from error
    return f"{kind}:{name},{host}"


def join_group(
    launch: Launch,
    names: str,
    *,
    timeout: datetime.timedelta | None = None,
    init_method: str | None = None,
) -> Any:
    """Meet the other processes and start the default process group.

    Args:
        launch: which process this is.
        names: as `collective_backends` gives.
        timeout: of joining and of each collective; None: 2 minutes to join on one machine, 10 on
            several, and torch's own for collectives.
        init_method: where to meet, as `init_process_group` takes it, instead of the launch's place.

    Returns:
        The store that the processes share.

    Raises:
        MissingRankError: not all processes came; the message names those that are missing.
        ProcessGroupError: they cannot meet, or the collectives cannot start on one of them.
    """
    limit = timeout or _JOIN_LIMITS[launch.local_size < launch.size]
    deadline = time.monotonic() + limit.total_seconds()
    try:
        store = _meet(launch, limit, init_method)
    except (RuntimeError, OSError, ValueError) as error:
        raise ProcessGroupError(
            f"process {launch.rank} of {launch.size} (started by {launch.source}) cannot meet the "
            f"others at {init_method or f'{launch.address}:{launch.port}'} within "
            f"{limit.total_seconds():g} s: {error!s:.300}. See that all {launch.size} processes "
            "run, and that MASTER_ADDR and MASTER_PORT name a free port of process 0's host."
        ) from error
    _await_everyone(store, launch, limit, deadline)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    try:
        dist.init_process_group(
            # Told of one device alone, torch knows no default and warns when the group ends.
            names.removeprefix(f"{_HOST}:"),
            store=store,
            rank=launch.rank,
            world_size=launch.size,
            **options,
        )
    except Exception as error:
        with contextlib.suppress(RuntimeError):  # the store has ended, too
            store.set(_FAILED, f"rank {launch.rank}: {error!s:.500}")
            store.set(f"started/{launch.rank}", "")
        raise ProcessGroupError(
            f"the collectives {names!r} do not start on rank {launch.rank}: {error}"
        ) from error
    try:
        _await_started(store, launch, names, limit)
    except ProcessGroupError:
        dist.destroy_process_group()
        raise
    return store


def _meet(launch: Launch, limit: datetime.timedelta, init_method: str | None) -> Any:
    if init_method is not None and init_method != "env://":
        store, _, _ = next(
            iter(
                _c10d.rendezvous(
                    init_method, rank=launch.rank, world_size=launch.size, timeout=limit
                )
            )
        )
        return store
    # An elastic agent serves the store itself, and tells its restarts apart.
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _c10d.TCPStore(
        launch.address,
        launch.port,
        launch.size,
        is_master=launch.rank == 0 and not by_agent,
        timeout=limit,
        wait_for_workers=False,
        multi_tenant=True,
    )
    # Served as long as this process lives: one who forms a group again may come before it is gone.
    _kept.append(store)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent else "0"
    return _c10d.PrefixStore(f"anydevice/{attempt}/{_count_groups()}", store)


_kept: Final[list[Any]] = []
_groups = 0


def _count_groups() -> int:
    """A number that is the same in all processes: how often this one has joined a group."""
    global _groups
    _groups += 1
    return _groups


def _await_everyone(store: Any, launch: Launch, limit: datetime.timedelta, deadline: float) -> None:
    keys = [f"joined/{rank}" for rank in range(launch.size)]
    store.set(keys[launch.rank], f"{socket.gethostname()}:{os.getpid()}")
    left = max(deadline - time.monotonic(), 0.1)
    with contextlib.suppress(RuntimeError):
        store.wait(keys, datetime.timedelta(seconds=left))
        return
    missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
    raise MissingRankError(
        f"{launch.source} asks for {launch.size} processes, and {launch.size - len(missing)} came "
        f"within {limit.total_seconds():g} s: rank {', '.join(map(str, missing))} is missing. "
        "Start all of them (torchrun --nproc-per-node, srun, mpirun or `anydevice launch`), unset "
        "WORLD_SIZE and RANK to run alone, or give a longer InitProcessGroupKwargs(timeout=...)."
    )


def _await_started(store: Any, launch: Launch, names: str, limit: datetime.timedelta) -> None:
    """Return once the group stands on every rank.

    A rank whose script ends at once would else close its connections while others still connect.
    """
    ranks = range(launch.size)
    try:
        store.set(f"started/{launch.rank}", "")
        store.wait([f"started/{rank}" for rank in ranks], limit)
        failed = store.get(_FAILED).decode() if store.check([_FAILED]) else None
        # The process that serves the store may end only after all others have read it.
        store.set(f"read/{launch.rank}", "")
    except RuntimeError as error:
        raise ProcessGroupError(
            f"the collectives {names!r} start on rank {launch.rank}, and not on all others within "
            f"{limit.total_seconds():g} s: {error!s:.300}. See what the other ranks print."
        ) from error
    if failed is not None:
        raise ProcessGroupError(f"the collectives {names!r} do not start on {failed}")
    if launch.rank == 0:
        with contextlib.suppress(RuntimeError):  # one that has died since
            store.wait([f"read/{rank}" for rank in ranks], limit)
