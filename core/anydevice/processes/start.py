"""The start of a process: reading the environment, choosing the device, forming the group."""

from __future__ import annotations

import datetime
import weakref
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.devices import parse_device, resolve_device
from anydevice.processes.environment import Launch, read_launch, setting
from anydevice.processes.exchange import Exchange
from anydevice.processes.group import collective_backends, join_group
from anydevice.processes.kinds import DistributedType
from anydevice.text import says_yes

__all__ = ["HOST", "start"]


#: What torch's own type hints do not show of it.
_c10d: Any = dist

HOST: Final = "cpu"

#: How long one rank waits for the others at a collective, by default.
_LIMIT: Final = datetime.timedelta(minutes=10)


def start(
    cpu: bool,
    backend: str | None,
    timeout: datetime.timedelta | None,
    init_method: str | None,
) -> dict[str, Any]:
    """The shared state: reads the environment, chooses the device, forms the group."""
    there_is_a_group = dist.is_available() and dist.is_initialized()
    launch = _launch_of_group() if there_is_a_group else read_launch()
    device = _choose_device(launch, cpu)
    device_backend = registry.get_backend(device)
    if device.index is not None:
        device_backend.set_device(device.index)
    store = _group_store() if there_is_a_group else None
    names: str | None = None
    if store is None and (launch.is_grouped or init_method is not None):
        names = _names(device_backend, backend, launch)
        store = join_group(launch, names, timeout=timeout, init_method=init_method)
    several = launch.size > 1
    return {
        "device": device,
        "device_backend": device_backend,
        "process_index": launch.rank,
        "num_processes": launch.size,
        "local_process_index": launch.local_rank,
        "local_num_processes": launch.local_size,
        "distributed_type": (
            DistributedType.of_device(device.type) if several else DistributedType.NO
        ),
        "backend": None if store is None else _name_for(device.type),
        "debug": says_yes(setting("DEBUG_MODE")),
        "fork_launched": False,
        "_exchange": (
            _exchange(store, launch, timeout or _LIMIT) if several and store is not None else None
        ),
    }


def _names(device_backend: DeviceBackend, name: str | None, launch: Launch) -> str:
    if launch.size == 1 and not device_backend.capabilities.collectives:
        return f"{HOST}:gloo"
    return collective_backends(device_backend, name)


def _name_for(device_type: str) -> str:
    """The name of the group's collectives for a device type."""
    parts = str(dist.get_backend_config()).split(",")
    pairs = dict(part.split(":", 1) for part in parts if ":" in part)
    return pairs.get(device_type) or str(dist.get_backend())


def _choose_device(launch: Launch, cpu: bool) -> torch.device:
    named = setting("TORCH_DEVICE") or setting("DEVICE_TYPE")
    if cpu or (not named and says_yes(setting("USE_CPU"))):
        return torch.device(HOST)
    if named:
        device = (resolve_device if ":" in named else parse_device)(named)
        if ":" in named or not device.is_accelerator:
            return device.torch
        kind: str | None = device.type
    else:
        kind = registry.primary_type()
    if kind is None:
        return torch.device(HOST)
    backend = registry.get_backend(kind)
    return backend.device(backend.local_device(launch.local_rank))


def _launch_of_group() -> Launch:
    """Which process this is in a group that somebody else formed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        told = read_launch()
    except Exception:  # noqa: BLE001 - the group is there, whatever the environment says
        told = Launch()
    if (told.rank, told.size) == (rank, size):
        return told
    return Launch(rank, size, rank, size, "torch.distributed")


#: One for as long as its group lives: another one would read what the first left in the store.
_exchanges: Final[weakref.WeakKeyDictionary[Any, Exchange]] = weakref.WeakKeyDictionary()


def _exchange(store: Any, launch: Launch, limit: datetime.timedelta) -> Exchange:
    """The exchange of the process group, also where the state was reset and the group goes on."""
    group = dist.distributed_c10d._get_default_group()
    if group not in _exchanges:
        _exchanges[group] = Exchange(store, launch.rank, launch.size, limit)
    found = _exchanges[group]
    found.set_limit(limit)
    return found


def _group_store() -> Any:
    store = dist.distributed_c10d._get_default_store()
    return _c10d.PrefixStore("anydevice", store)
