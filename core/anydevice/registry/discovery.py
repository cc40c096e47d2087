"""Find the plugins by entry point, import them, and set aside what is broken or claimed twice."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pluggy

from anydevice.backend import ENTRY_POINT_GROUP, Capabilities, DeviceBackend
from anydevice.backend_check import version_fault
from anydevice.errors import BackendError
from anydevice.installed import entry_points
from anydevice.registry.records import BackendRecord
from anydevice.registry.selection import ENVIRONMENT_VARIABLE, Selection, normal

__all__ = ["discover"]

#: Places in a device map that no backend can claim.
_NO_DEVICES: Final = frozenset({"disk", "meta"})
#: Members that are a text or None.
_TEXTS: Final = ("torch_package", "collective_backend", "visible_devices_env")
#: The distribution whose backends stand when another package claims the same type.
_OWN: Final = "anydevice"


class _HookSpecs:
    @pluggy.HookspecMarker("anydevice")
    def anydevice_backends(self) -> Sequence[DeviceBackend]:  # type: ignore[empty-body]
        """Return the backends that this plugin adds."""


def discover(selection: Selection) -> list[BackendRecord]:
    """Import every plugin that ``selection`` allows. Never raises for a plugin's fault."""
    records: list[BackendRecord] = []
    describe = functools.cache(_name_and_version)
    for point in entry_points(ENTRY_POINT_GROUP):
        name, version = describe(point.dist)
        records += _load(BackendRecord(point.name, name, version, point.name), point, selection)
    _mark_duplicates(records, selection)
    return records


def _name_and_version(dist: importlib.metadata.Distribution | None) -> tuple[str, str]:
    if dist is None:
        return "unknown", ""
    # Of the headers alone: `dist.metadata` parses the whole readme behind them, which takes longer
    # than all else that discovery does.
    found: dict[str, str] = {}
    for line in (dist.read_text("METADATA") or "").splitlines():
        key, colon, value = line.partition(": ")
        if not colon or len(found) == 2:
            break
        if key in ("Name", "Version"):
            found[key] = value.strip()
    if len(found) < 2:
        return dist.metadata["Name"], dist.metadata["Version"]
    return found["Name"], found["Version"]


def _load(
    base: BackendRecord, point: importlib.metadata.EntryPoint, selection: Selection
) -> Iterable[BackendRecord]:
    """The records of one entry point: its backends, or one that says what is wrong with it."""
    if point.name in selection.denied:  # not even imported
        return [_excluded(base)]
    try:
        with base.timed("importing the plugin"):
            backends = _ask(point)
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
        record = dataclasses.replace(
            base,
            device_type=backend.device_type,
            backend=backend,
            notes=list(base.notes),
            _unsaid=list(base._unsaid),
        )
        if newer := version_fault(backend):
            record.note(newer)
        allowed = selection.allows(point.name, backend.device_type)
        records.append(record if allowed else _excluded(record))
    return records


def _ask(point: importlib.metadata.EntryPoint) -> Sequence[DeviceBackend]:
    """Import a plugin, call its hook, check what it returns."""
    plugin = point.load()
    manager = pluggy.PluginManager("anydevice")
    manager.add_hookspecs(_HookSpecs)
    manager.register(plugin, point.name)
    caller: Callable[[], list[Any]] = manager.hook.anydevice_backends
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
    if not isinstance(backend.priority, int) or isinstance(backend.priority, bool):
        raise BackendError(f"priority of {kind!r} is {backend.priority!r}, not an int")
    for member in _TEXTS:
        value = getattr(backend, member)
        if value is not None and not isinstance(value, str):
            raise BackendError(f"{member} of {kind!r} is {value!r}, neither a text nor None")
    words: Any = backend.out_of_memory_words
    if isinstance(words, str) or not all(isinstance(word, str) for word in words):
        raise BackendError(f"out_of_memory_words of {kind!r} is {words!r}, not a tuple of texts")
    version_fault(backend)


def _excluded(record: BackendRecord) -> BackendRecord:
    return dataclasses.replace(
        record,
        backend=None,
        status="excluded",
        reason=f"left out by {ENVIRONMENT_VARIABLE}={os.environ.get(ENVIRONMENT_VARIABLE)}",
    )


def _mark_duplicates(records: list[BackendRecord], selection: Selection) -> None:
    """Leave one backend for each type, or none where two packages claim it and none is selected."""
    by_type: dict[str, list[BackendRecord]] = {}
    for record in records:
        if record.backend is not None:
            by_type.setdefault(record.device_type, []).append(record)
    for kind, claims in by_type.items():
        if len(claims) == 1:
            continue
        pick = normal(selection.picks.get(kind, ""))
        picked = [r for r in claims if normal(r.distribution) == pick]
        built_in = [r for r in claims if normal(r.distribution) == _OWN]
        stands = (picked if len(picked) == 1 else built_in if len(built_in) == 1 else [None])[0]
        for record in claims:
            if record is stands:
                continue
            record.status = "excluded" if stands is not None and picked else "duplicate"
            record.backend = None
            record.reason = _why_not(record, claims, stands)


def _why_not(
    record: BackendRecord, claims: Sequence[BackendRecord], stands: BackendRecord | None
) -> str:
    kind = record.device_type
    both = f"device type {kind!r} is claimed by {' and '.join(r.package for r in claims)}"
    if stands is None:
        return (
            f"{both}; uninstall one, or pick one: {ENVIRONMENT_VARIABLE}={kind}@"
            f"{claims[0].distribution}"
        )
    return (
        f"{both}; {stands.package} stands. To use this one: "
        f"{ENVIRONMENT_VARIABLE}={kind}@{record.distribution}"
    )
