"""Where mutants are kept, and how one is put in place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final
from unittest import mock

from anydevice import registry
from anydevice.backend import DeviceBackend

__all__ = ["Fault", "Mutant", "gallery", "install", "installed", "mutant", "patched", "together"]

_MODULES: Final = (
    "discovery",
    "memory",
    "movement_layout",
    "movement_order",
    "movement_places",
    "movement_sources",
    "movement_values",
    "out_of_memory",
    "streams",
    "events",
    "pinned_memory",
    "random_numbers",
    "dtypes",
    "collective_forms",
    "collectives",
    "inference",
    "processes",
    "training",
    "situations",
    "numbers",
    "kernels",
    "elements",
    "operators",
    "first_packages",
    "training_steps",
    "seldom",
    "orders",
    "crossings",
    "waiting",
    "beside",
    "lacking",
)
#: Names the mutant that child processes put in place as they start; see ``startup``.
MUTANT_VARIABLE: Final = "ANYDEVICE_TEST_MUTANT"
_STARTUP: Final = Path(__file__).with_name("startup")
_found: dict[str, Mutant] = {}


class Fault(DeviceBackend):
    """Base of the faults. What a fault cannot do as a method, it patches."""

    #: Changes to the registry's record.
    record_changes: ClassVar[dict[str, Any]] = {}

    def patches(self) -> list[Any]:
        """Context managers that are entered while the mutant is in place."""
        return []


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault, and what must catch it.

    Attributes:
        name: of its class.
        paragraph: the id of the paragraph that it breaks.
        check: the one check that must catch it; None for any of its paragraph.
        operators: of the trials of operators only those are made that have this in their names.
        fault: the class.
        base: the device type whose right backend is broken.
        flag: whether it is caught by a flag, not by a failure.
        big: whether it needs several GiB and some time.
        crash: whether it takes the process with it.
    """

    name: str
    paragraph: str
    fault: type[Fault]
    base: str = "sim"
    flag: bool = False
    big: bool = False
    crash: bool = False
    check: str | None = None
    operators: str | None = None

    @property
    def story(self) -> str:
        """What the fault is."""
        return " ".join((self.fault.__doc__ or "").split())


def mutant(
    paragraph: str,
    *,
    base: str = "sim",
    flag: bool = False,
    big: bool = False,
    crash: bool = False,
    check: str | None = None,
    operators: str | None = None,
) -> Callable[[type[Fault]], type[Fault]]:
    """Add a fault to the gallery."""

    def add(fault: type[Fault]) -> type[Fault]:
        name = fault.__name__
        if name in _found:
            raise ValueError(f"two mutants are named {name}")
        _found[name] = Mutant(name, paragraph, fault, base, flag, big, crash, check, operators)
        return fault

    return add


@functools.cache
def gallery() -> dict[str, Mutant]:
    """All mutants by name."""
    for module in _MODULES:
        importlib.import_module(f"mutants.{module}")
    return dict(_found)


def find(name: str) -> Mutant:
    """A mutant of the gallery, or one that the rules make."""
    if name in gallery():
        return gallery()[name]
    if "+" in name:
        faults = tuple(gallery()[one].fault for one in name.split("+"))
        return Mutant(name, "", type("Together", faults, {"__doc__": "Many at once."}))
    from mutation.rules import made

    return made()[name]


def together(count: int, seed: int) -> str:
    """The name of so many faults in one backend: of those that do not undo each other.

    With an odd seed none of them hides the devices, so that the other checks meet theirs.
    """
    whole = [
        m.name
        for m in gallery().values()
        if m.base == "sim"
        and not (seed % 2 and m.paragraph.startswith("DEV"))
        and m.fault.__bases__ == (Fault,)
        and not (m.crash or m.flag or {"patches", "__init__"} & set(vars(m.fault)))
    ]
    return "+".join(random.Random(seed).sample(whole, count))


def child_environment(name: str) -> dict[str, str]:
    """What makes processes that are started from this one have the mutant, too."""
    paths = [str(_STARTUP), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    # A fork of a warm process has no mutant.
    return {MUTANT_VARIABLE: name, "PYTHONPATH": path, "_ANYDEVICE_WARM_PROCESS": ""}


@contextlib.contextmanager
def installed(name: str) -> Iterator[registry.BackendRecord]:
    """Have a mutant in the right backend's place, in child processes too, for a context."""
    found = find(name)
    right = registry.get_backend(found.base)
    (record,) = [r for r in registry.list_backends() if r.backend is right]
    broken: Any = type(name, (found.fault, type(right)), {})()
    changes = {"backend": broken, **found.fault.record_changes}
    before = {field: getattr(record, field) for field in changes}
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, child_environment(name)))
        for patch in broken.patches():
            stack.enter_context(patch)
        try:
            vars(record).update(changes)
            yield record
        finally:
            vars(record).update(before)


_kept = contextlib.ExitStack()


def install(name: str) -> None:
    """Put a mutant in place for the rest of the process."""
    _kept.enter_context(installed(name))


def patched(
    owner: Any, name: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Any:
    """A patch that puts ``change(original)`` in an attribute's place."""
    return mock.patch.object(owner, name, change(getattr(owner, name)))
