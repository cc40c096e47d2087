"""Which backends there are: discovery, selection, and a place for the broken ones.

Discovery is lazy (the first call of any function here), done once a process, and safe under
threads and fork. A plugin that fails to import, or returns nonsense, is left out and listed; it
never breaks ``import anydevice`` or another device. Whether a device is *available* is asked again
each time, since a driver or a simulator may come later; only a vendor's package that is not
installed, or that is slow, is not asked again until `refresh`.

Environment variable ``ANYDEVICE_BACKENDS``: a comma-separated list of device types (or entry-point
names). ``cpu,foo`` allows only those; ``-foo`` leaves one out; ``foo@anydevice-foo`` picks the
package that may claim ``foo`` when two do; without a pick anydevice's own backend stands. The host
cannot be left out: weights start and end there. A name that matches nothing is warned of.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import warnings
from typing import Any, Final

import torch

from anydevice.backend import DeviceBackend, MemoryInfo, torchs_accelerator
from anydevice.errors import BackendError, DuplicateBackendError, UnknownDeviceError
from anydevice.installed import forget
from anydevice.registry.discovery import discover
from anydevice.registry.records import BackendRecord
from anydevice.registry.selection import HOST, Selection, unknown_variables

__all__ = [
    "BackendRecord",
    "available_devices",
    "get_backend",
    "known_types",
    "list_backends",
    "measure_memory",
    "primary_type",
    "refresh",
]


class _Registry:
    """The process's backends. One instance, below."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: list[BackendRecord] | None = None

    def renew_lock(self) -> None:
        """After a fork: the child must not inherit a lock that another thread held."""
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Clear the state, so that the next call discovers again."""
        with self._lock:
            self._records = None

    def records(self) -> list[BackendRecord]:
        records = self._records
        if records is None:
            faults: list[str] = []
            with self._lock:
                if self._records is None:
                    selection = Selection.from_environment()
                    self._records = discover(selection)
                    faults = _environment_faults(selection, self._records)
                records = self._records
            for fault in faults:
                warnings.warn(fault, stacklevel=4)
            for record in records:
                record.warn()
        return records

    def default_backend(self) -> BackendRecord | None:
        """A record for the type that torch reports and no plugin claims."""
        kind = torchs_accelerator()
        if kind is None or kind == HOST:
            return None
        with self._lock:
            records = self.records()
            if any(record.device_type == kind for record in records):
                return None
            if not torch.accelerator.is_available():
                return None  # a registered type whose devices may come later: ask again then
            if not Selection.from_environment().allows(kind):
                return None
            record = BackendRecord("torch", "torch", torch.__version__, kind)
            record.backend = type("DefaultBackend", (DeviceBackend,), {"device_type": kind})()
            records.append(record)
        warnings.warn(
            f"no plugin claims device type {kind!r}; using the default backend, uncertified",
            stacklevel=4,
        )
        return record


_registry: Final = _Registry()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_registry.renew_lock)


# ---------------------------------------------------------------------- the public functions


def list_backends() -> list[BackendRecord]:
    """Every backend found, with the broken, duplicate and excluded ones and why.

    Returns:
        Records, the available first, by priority and device type.

    Example:
        >>> import anydevice
        >>> "cpu" in [record.device_type for record in anydevice.list_backends()]
        True
    """
    return [record for record, _ in _counted()]


def _counted() -> list[tuple[BackendRecord, int]]:
    """Every record with its count of devices now, in order; each is asked once."""
    _registry.default_backend()
    counted = [(record, record.count()) for record in _registry.records()]
    return sorted(counted, key=lambda pair: _order(pair[0]))


def refresh() -> None:
    """Forget what was found, so that the next call finds what was installed since."""
    importlib.invalidate_caches()
    forget()
    _registry.reset()


def get_backend(device: str | torch.device) -> DeviceBackend:
    """Return the backend of a device or device type.

    Args:
        device: a `torch.device`, or a string such as ``"foo"`` or ``"foo:1"``. (Bare indices are
            `anydevice.devices`' business.)

    Raises:
        UnknownDeviceError: no plugin claims the type, and torch does not report it.
        DuplicateBackendError: two packages claim it.
        BackendError: its plugin is broken.

    Example:
        >>> import anydevice
        >>> anydevice.get_backend("cpu").device_count()
        1
    """
    kind = device.type if isinstance(device, torch.device) else device.partition(":")[0]
    record = _find(kind)
    if record is None:
        _registry.default_backend()
        record = _find(kind)
    if record is None:
        raise UnknownDeviceError(
            f"no backend for device type {kind!r}. Known types: "
            f"{', '.join(sorted(known_types()))}. Install its vendor's anydevice package, or see "
            "`anydevice backends` for a plugin that is broken."
        )
    if record.status == "duplicate" and record.backend is None:
        raise DuplicateBackendError(record.reason)
    if record.backend is None:
        raise BackendError(
            f"the backend for {kind!r} ({record.package}) is {record.status}: {record.reason}"
        )
    record.prepare()
    record.warn()
    return record.backend


def measure_memory(device: str | torch.device) -> MemoryInfo:
    """Ask a device's backend for its free and total memory in bytes, and check the answer.

    Raises:
        UnknownDeviceError, BackendError: as `get_backend`; or the answer is no `MemoryInfo`.
        NotImplementedError: the device does not tell; other errors are the backend's own.
    """
    kind, _, number = str(device).partition(":")
    backend = get_backend(kind)
    record = _find(backend.device_type)
    if record is None or record.backend is not backend:  # a stand-in of a test
        record = BackendRecord("", "", "", backend.device_type, backend)
    return record.memory_info(int(number or 0))


def available_devices() -> list[torch.device]:
    """All devices that can be used now: accelerators by priority, fastest first, then the host.

    Example:
        >>> import anydevice
        >>> str(anydevice.available_devices()[-1])
        'cpu'
    """
    return [
        torch.device(record.device_type, index)
        if record.device_type != HOST
        else torch.device(HOST)
        for record, count in _counted()
        for index in range(1 if record.device_type == HOST else count)
    ]


def primary_type() -> str | None:
    """The accelerator type that a bare index (``0``) means here; None without an accelerator."""
    candidates = [r for r in list_backends() if r.status == "available" and r.device_type != HOST]
    return candidates[0].device_type if candidates else None


def known_types() -> set[str]:
    """Device types that some plugin claims, here or not."""
    return {record.device_type for record in _registry.records() if record.status != "broken"}


# ---------------------------------------------------------------------- order and lookup


def _find(kind: str) -> BackendRecord | None:
    matches = [record for record in _registry.records() if record.device_type == kind]
    return min(matches, key=lambda r: (r.backend is None, r.status == "excluded"), default=None)


def _order(record: BackendRecord) -> tuple[Any, ...]:
    priority = record.backend.priority if record.backend is not None else 0
    return (record.status != "available", -priority, not _is_torchs_own(record), record.device_type)


def _is_torchs_own(record: BackendRecord) -> bool:
    """Whether torch itself calls this type its accelerator: breaks ties of priority."""
    return torchs_accelerator() == record.device_type


def _environment_faults(selection: Selection, records: list[BackendRecord]) -> list[str]:
    names = {name for r in records for name in (r.entry_point, r.device_type)}
    # A type that stays claimed twice has an error of its own, which names the packages to pick.
    packages = sorted({r.distribution for r in records})
    picks = {
        kind: package
        for kind, package in selection.picks.items()
        if not any(r.device_type == kind and r.status == "duplicate" for r in records)
    }
    selection = dataclasses.replace(selection, picks=picks)
    return [*selection.faults(names, packages), *unknown_variables()]
