"""Which backends there are: discovery, selection, and a place for the broken ones.

Discovery is lazy (the first call of any function here), done once a process, and safe under
threads and fork. A plugin that fails to import, or returns nonsense, is left out and listed; it
never breaks ``import anydevice`` or another device. Whether a device is *available* is asked anew
each time, since a driver or a simulator may come later; only a vendor's package that is not
installed is not looked for again until `refresh`.

Environment variable ``ANYDEVICE_BACKENDS``: a comma-separated list of device types (or entry-point
names). ``cpu,foo`` allows only those; ``-foo`` leaves one out; ``foo@anydevice-foo`` picks the
package that may claim ``foo`` when two do. The host cannot be left out: weights start and end
there.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import pluggy
import torch

from anydevice.backend import ENTRY_POINT_GROUP, Capabilities, DeviceBackend, torchs_accelerator
from anydevice.errors import BackendError, DuplicateBackendError, UnknownDeviceError

__all__ = [
    "BackendRecord",
    "available_devices",
    "get_backend",
    "known_types",
    "list_backends",
    "primary_type",
    "refresh",
]

HOST: Final = "cpu"
ENVIRONMENT_VARIABLE: Final = "ANYDEVICE_BACKENDS"
#: Places in a device map that no backend can claim.
_NO_DEVICES: Final = frozenset({"disk", "meta"})
Status = Literal["available", "unavailable", "broken", "duplicate", "excluded"]


class _HookSpecs:
    @pluggy.HookspecMarker("anydevice")
    def anydevice_backends(self) -> Sequence[DeviceBackend]:  # type: ignore[empty-body]
        """Return the backends that this plugin adds."""


@dataclasses.dataclass
class BackendRecord:
    """One backend, or one plugin that gave none.

    Attributes:
        entry_point: its name in the entry-point group; ``"torch"`` for a type that no plugin
            claims.
        distribution: the package that ships it.
        version: that package's version.
        device_type: the torch device type, or the entry-point name when the plugin is broken.
        backend: the object that does the work; None when broken or excluded.
        status: ``available``, ``unavailable`` (no driver or device), ``broken``, ``duplicate`` or
            ``excluded`` (by ``ANYDEVICE_BACKENDS``).
        reason: why it is not available.
    """

    entry_point: str
    distribution: str
    version: str
    device_type: str
    backend: DeviceBackend | None = None
    status: Status = "unavailable"
    reason: str = ""
    #: The `DeviceBackend.torch_package` that was looked for and not found.
    _absent: str | None = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def package(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".strip()

    def count(self) -> int:
        """How many devices the backend has now; 0 with a `reason` when none, or when it fails."""
        if self.backend is None or self.status in ("broken", "duplicate", "excluded"):
            return 0
        package = self.backend.torch_package
        if package is not None and package == self._absent and package not in sys.modules:
            return 0  # a failed search of all of sys.path is the dear part of the question
        try:
            available = self.backend.is_available()
            count = self.backend.device_count() if available else 0
            if not isinstance(count, int) or count < 0:
                raise TypeError(f"device_count() returned {count!r}, not a count")
            if count:
                torch.device(self.device_type)  # raises when torch does not know the type
        except Exception as error:  # noqa: BLE001 - one bad backend must not break another device
            self.status, self.reason = "unavailable", f"{type(error).__name__}: {error}"
            return 0
        self.status = "available" if count else "unavailable"
        self.reason = "" if count else self.backend.why_unavailable()
        self._absent = package if package and not count and not _is_installed(package) else None
        return count


def _is_installed(package: str) -> bool:
    """Whether a package could be imported, as far as can be told without doing so."""
    try:
        return package in sys.modules or importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # its parent is missing; or its name is none
        return False


class _Registry:
    """The process's backends. One instance, below."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._records: list[BackendRecord] | None = None

    def renew_lock(self) -> None:
        """After a fork: the child must not inherit a lock that another thread held."""
        self._lock = threading.RLock()

    def reset(self) -> None:
        """Forget all, so that the next call discovers anew."""
        with self._lock:
            self._records = None

    def records(self) -> list[BackendRecord]:
        records = self._records
        if records is None:
            with self._lock:
                if self._records is None:
                    self._records = _discover(_Selection.from_environment())
                records = self._records
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
            if not _Selection.from_environment().allows(kind):
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
    """
    return [record for record, _ in _counted()]


def _counted() -> list[tuple[BackendRecord, int]]:
    """Every record with its count of devices now, in order; each is asked once."""
    _registry.default_backend()
    counted = [(record, record.count()) for record in _registry.records()]
    return sorted(counted, key=lambda pair: _order(pair[0]))


def refresh() -> None:
    """Forget what was found, so that the next question finds what was installed meanwhile."""
    importlib.invalidate_caches()
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
    if record.status == "duplicate":
        raise DuplicateBackendError(record.reason)
    if record.backend is None:
        raise BackendError(
            f"the backend for {kind!r} ({record.package}) is {record.status}: {record.reason}"
        )
    return record.backend


def available_devices() -> list[torch.device]:
    """All devices that can be used now: accelerators by priority, fastest first, then the host."""
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


# ---------------------------------------------------------------------- order and selection


def _find(kind: str) -> BackendRecord | None:
    matches = [record for record in _registry.records() if record.device_type == kind]
    return min(matches, key=lambda r: (r.backend is None, r.status == "excluded"), default=None)


def _order(record: BackendRecord) -> tuple[Any, ...]:
    priority = record.backend.priority if record.backend is not None else 0
    return (record.status != "available", -priority, not _is_torchs_own(record), record.device_type)


def _is_torchs_own(record: BackendRecord) -> bool:
    """Whether torch itself calls this type its accelerator: breaks ties of priority."""
    return torchs_accelerator() == record.device_type


@dataclasses.dataclass(frozen=True)
class _Selection:
    """What ``ANYDEVICE_BACKENDS`` says."""

    allowed: frozenset[str]
    denied: frozenset[str]
    picks: dict[str, str]

    @classmethod
    def from_environment(cls) -> _Selection:
        allowed, denied, picks = set(), set(), {}
        for word in os.environ.get(ENVIRONMENT_VARIABLE, "").split(","):
            name, _, package = word.strip().partition("@")
            if name.startswith("-"):
                denied.add(name[1:])
            elif package:
                picks[name] = package
            elif name:
                allowed.add(name)
        return cls(frozenset(allowed), frozenset(denied - {HOST}), picks)

    def allows(self, *names: str) -> bool:
        if HOST in names:
            return True
        if self.denied.intersection(names):
            return False
        return not self.allowed or bool((self.allowed | set(self.picks)).intersection(names))


# ---------------------------------------------------------------------- discovery


def _discover(selection: _Selection) -> list[BackendRecord]:
    manager = pluggy.PluginManager("anydevice")
    manager.add_hookspecs(_HookSpecs)
    records: list[BackendRecord] = []
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        records += _load(manager, point, selection)
    _mark_duplicates(records, selection)
    return records


def _load(
    manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint, selection: _Selection
) -> Iterable[BackendRecord]:
    """The records of one entry point: its backends, or one that says what is wrong with it."""
    dist = point.dist
    base = BackendRecord(
        point.name, dist.name if dist else "unknown", dist.version if dist else "", point.name
    )
    if point.name in selection.denied:  # not even imported
        return [_excluded(base)]
    try:
        backends = _ask(manager, point)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a broken plugin is listed, never raised
        if not selection.allows(point.name):
            return [_excluded(base)]
        return [
            dataclasses.replace(base, status="broken", reason=f"{type(error).__name__}: {error}")
        ]
    if not backends:
        return [dataclasses.replace(base, reason="it offers no backend on this machine")]
    records = []
    for backend in backends:
        record = dataclasses.replace(base, device_type=backend.device_type, backend=backend)
        allowed = selection.allows(point.name, backend.device_type)
        records.append(record if allowed else _excluded(record))
    return records


def _ask(
    manager: pluggy.PluginManager, point: importlib.metadata.EntryPoint
) -> Sequence[DeviceBackend]:
    """Import a plugin, call its hook, check what it returns."""
    plugin = point.load()
    name = f"{point.dist.name if point.dist else ''}:{point.name}"
    manager.register(plugin, name)
    caller = manager.subset_hook_caller(
        "anydevice_backends", [p for p in manager.get_plugins() if p is not plugin]
    )
    answers = caller()
    if not manager.get_hookcallers(plugin):
        raise BackendError(f"{point.value} has no @hookimpl function named anydevice_backends")
    (backends,) = answers or [None]
    if not isinstance(backends, (list, tuple)):
        raise BackendError(
            f"anydevice_backends() returned {type(backends).__name__}, not a list of DeviceBackend"
        )
    for backend in backends:
        _check(backend)
    return backends


def _check(backend: object) -> None:
    if not isinstance(backend, DeviceBackend):
        raise BackendError(f"{backend!r} is not an instance of anydevice.backend.DeviceBackend")
    kind = getattr(backend, "device_type", None)
    if not isinstance(kind, str) or not kind.isidentifier() or kind in _NO_DEVICES:
        raise BackendError(f"device_type is {kind!r}, not a torch device type such as 'foo'")
    if not isinstance(backend.capabilities, Capabilities):
        raise BackendError(f"capabilities of {kind!r} is not a Capabilities object")
    if not isinstance(backend.priority, int):
        raise BackendError(f"priority of {kind!r} is {backend.priority!r}, not an int")


def _excluded(record: BackendRecord) -> BackendRecord:
    return dataclasses.replace(
        record,
        backend=None,
        status="excluded",
        reason=f"left out by {ENVIRONMENT_VARIABLE}={os.environ.get(ENVIRONMENT_VARIABLE)}",
    )


def _normal(distribution: str) -> str:
    """A distribution's name as packaging compares it: ``anydevice_foo`` is ``Anydevice-Foo``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _mark_duplicates(records: list[BackendRecord], selection: _Selection) -> None:
    by_type: dict[str, list[BackendRecord]] = {}
    for record in records:
        if record.backend is not None:
            by_type.setdefault(record.device_type, []).append(record)
    for kind, claims in by_type.items():
        if len(claims) == 1:
            continue
        pick = _normal(selection.picks.get(kind, ""))
        picked = [r for r in claims if _normal(r.distribution) == pick]
        reason = (
            f"device type {kind!r} is claimed by {' and '.join(r.package for r in claims)}; "
            f"uninstall one, or pick one: {ENVIRONMENT_VARIABLE}={kind}@{claims[0].distribution}"
        )
        for record in claims:
            if len(picked) == 1 and record is picked[0]:
                continue
            record.status = "excluded" if len(picked) == 1 else "duplicate"
            record.backend = None
            record.reason = reason
