"""What ``ANYDEVICE_BACKENDS`` says, and what in it matches nothing."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
from collections.abc import Collection, Iterator
from typing import Final

import torch

from anydevice.backend import torchs_accelerator
from anydevice.text import suggest

__all__ = ["ENVIRONMENT_VARIABLE", "HOST", "Selection", "normal", "unknown_variables"]

HOST: Final = "cpu"
ENVIRONMENT_VARIABLE: Final = "ANYDEVICE_BACKENDS"
#: Every variable that anydevice and its own packages read.
_VARIABLES: Final = (
    ENVIRONMENT_VARIABLE,
    "ANYDEVICE_CONFIG_FILE",
    "ANYDEVICE_PROGRESS",
    "ANYDEVICE_SIMULATOR",
)


@dataclasses.dataclass(frozen=True)
class Selection:
    """Which backends the environment allows.

    Attributes:
        allowed: types or entry-point names; empty allows all.
        denied: those that are left out.
        picks: a type to the package that may claim it.
    """

    allowed: frozenset[str]
    denied: frozenset[str]
    picks: dict[str, str]

    @classmethod
    def from_environment(cls) -> Selection:
        """Read the variable."""
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
        """Whether a backend that goes by any of ``names`` may be used."""
        if HOST in names:
            return True
        if self.denied.intersection(names):
            return False
        return not self.allowed or bool((self.allowed | set(self.picks)).intersection(names))

    def faults(self, names: Collection[str], packages: Collection[str]) -> Iterator[str]:
        """What the variable names and nothing here answers to.

        Args:
            names: device types and entry-point names that were found.
            packages: distributions that were found.
        """
        known = sorted({*names, HOST})
        for name in sorted({*self.allowed, *self.denied, *self.picks} - set(known)):
            if not _torch_knows(name):
                yield (
                    f"{ENVIRONMENT_VARIABLE} names {name!r}, and no installed backend has that name"
                    f"{suggest(name, known) or '.'} Found: {', '.join(known)}."
                )
        found = {normal(package) for package in packages}
        for name, package in self.picks.items():
            if normal(package) not in found:
                yield (
                    f"{ENVIRONMENT_VARIABLE} picks package {package!r} for {name!r}, and no such "
                    f"package has a backend{suggest(package, packages) or '.'}"
                )


def unknown_variables() -> Iterator[str]:
    """Environment variables that look like a misspelled one of anydevice's."""
    for name in os.environ:
        if name.startswith("ANYDEVICE") and name not in _VARIABLES:
            close = difflib.get_close_matches(name, _VARIABLES, 1, 0.88)
            if close:
                yield f"{name} is set, and nothing reads it: did you mean {close[0]}?"


def normal(distribution: str) -> str:
    """A distribution's name as packaging compares it: ``anydevice_foo`` is ``Anydevice-Foo``."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def _torch_knows(name: str) -> bool:
    if name == torchs_accelerator():
        return True
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True
