"""Check a backend against its vendor's published API, on a machine without the device.

    from anydevice_conformance import static

    for finding in static.check("npu"):
        print(finding)

The vendor's names and signatures are data here (``data/npu.json``, made by
`anydevice_conformance.static.extract` from the vendor's package); the backend's calls are read from
its source. Neither the vendor's package nor the backend is imported. What this cannot see is what
the calls do: a backend that passes is "static only", never "certified".
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import torch

from anydevice.backend import ENTRY_POINT_GROUP
from anydevice.errors import BackendError
from anydevice_conformance.static.calls import Call, read_calls
from anydevice_conformance.static.surface import Surface, parse_signature

__all__ = ["Call", "Finding", "Surface", "calls_of", "check", "load_surface", "published"]

_DATA = Path(__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A call that the published API does not bear out.

    Attributes:
        call: what the backend calls, and where.
        problem: what is wrong with it, in words.
        published: the API that says so: module, version and source.
    """

    call: Call
    problem: str
    published: str

    def __str__(self) -> str:
        return f"{self.call.file}:{self.call.line}: {self.call}: {self.problem} [{self.published}]"


def published() -> list[str]:
    """The device types whose vendor's API is known here."""
    return sorted(file.stem for file in _DATA.glob("*.json"))


def load_surface(device_type: str) -> Surface:
    """The published API of a device type.

    Raises:
        BackendError: it is not known here; the message tells how to make the file.
    """
    file = _DATA / f"{device_type}.json"
    if not file.is_file():
        raise BackendError(
            f"no published API is kept for device type {device_type!r} (there are "
            f"{', '.join(published())}). Make one: python -m anydevice_conformance.static.extract "
            f"MODULE --device-type {device_type} --output {device_type}.json, and give it to "
            f"anydevice_conformance.static.check({device_type!r}, surface=Surface.load(path))."
        )
    return Surface.load(file)


def calls_of(device_type: str, source: Path | None = None) -> list[Call]:
    """Every call to torch or to the vendor's module that a backend makes or inherits.

    Args:
        device_type: the backend's.
        source: its file; None looks it up among the installed plugins, without importing one.

    Raises:
        BackendError: no plugin's source has a backend of that type.
    """
    if source is not None:
        return read_calls(source, device_type)
    for point in importlib.metadata.entry_points(group=ENTRY_POINT_GROUP):
        spec = importlib.util.find_spec(point.module)
        if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        try:
            return read_calls(Path(spec.origin), device_type)
        except LookupError:
            continue
    raise BackendError(
        f"no installed plugin has a backend class with device_type = {device_type!r}"
    )


def check(
    device_type: str, *, source: Path | None = None, surface: Surface | None = None
) -> list[Finding]:
    """Compare a backend's calls with its vendor's published API.

    Args:
        device_type: the backend's.
        source: as in `calls_of`.
        surface: the published API; None takes the one that comes along.

    Returns:
        What does not agree; empty when all does.

    Raises:
        BackendError: there is no such backend, or no published API for it.
    """
    surface = surface or load_surface(device_type)
    findings = []
    for call in calls_of(device_type, source):
        problem = _problem(call, surface)
        if problem:
            findings.append(Finding(call, problem, surface.title))
    return findings


def _problem(call: Call, surface: Surface) -> str:
    if call.owner == "torch":
        return _torch_problem(call)
    name = call.name
    if name not in surface.names:
        if call.optional or (call.fallback and _find_in_torch(call.fallback) is not None):
            return ""
        near = surface.like(name)
        return f"there is no {surface.module}.{name}" + (f"; there is {near}" if near else "")
    signature = surface.names[name]
    return "" if signature is None else _misfit(call, parse_signature(signature))


def _torch_problem(call: Call) -> str:
    function = _find_in_torch(call.name)
    if function is None:
        return "" if call.optional else f"torch {torch.__version__} has no torch.{call.name}"
    try:
        return _misfit(call, inspect.signature(function))
    except ValueError:  # a function of torch's compiled part
        return ""


def _find_in_torch(name: str) -> Any:
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _misfit(call: Call, signature: inspect.Signature) -> str:
    """What is wrong with a call's arguments; empty when they fit."""
    bind = signature.bind_partial if call.starred else signature.bind
    try:
        bind(*[None] * call.positional, **dict.fromkeys(call.keywords))
    except TypeError as error:
        return f"it takes {signature}: {error}"
    return ""
