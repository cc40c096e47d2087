"""What a pytest item of the suite is: which check, which case, and whether it is our own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from anydevice_conformance.specification import GROUPS

__all__ = [
    "case_name",
    "check_name",
    "foreign_parts",
    "is_check",
    "is_ours",
    "needs_of",
    "place_of",
]

_CHECK: Final = re.compile(r"test_([A-Z]{3})_(\d{3})(?:_|$)")
_SUITE: Final = Path(__file__).parent
_OWN_FIXTURES: Final = ("subject", "backend", "index", "pair")


def check_name(item: pytest.Item) -> str:
    """The name of an item's check, without its parameters."""
    return str(getattr(item, "originalname", None) or item.name)


def needs_of(item: pytest.Item) -> list[str]:
    """The capabilities that a check needs."""
    return sorted({str(mark.args[0]) for mark in item.iter_markers("anydevice_needs")})


def place_of(item: pytest.Item) -> tuple[int, int]:
    """In the specification's order, whatever files the checks stand in."""
    match = _CHECK.match(check_name(item))
    if match is None or match[1] not in GROUPS:
        return len(GROUPS), 0
    return list(GROUPS).index(match[1]), int(match[2])


def is_check(item: pytest.Item) -> bool:
    """Whether an item is a check: its name carries a paragraph's id."""
    return _CHECK.match(check_name(item)) is not None


def is_ours(file: str) -> bool:
    """Whether a file belongs to the suite."""
    return Path(file).resolve().is_relative_to(_SUITE)


def case_name(item: pytest.Item) -> str:
    """The name of an item's parameters; empty where it has none."""
    callspec = getattr(item, "callspec", None)
    return str(callspec.id) if callspec is not None else ""


def foreign_parts(item: pytest.Item) -> list[str]:
    """What stands in for the suite's own check, fixtures or marks."""
    if not is_check(item):
        return []
    found = []
    if not is_ours(str(item.path)):
        found.append(f"{check_name(item)} comes from {item.path}")
    for mark in item.iter_markers():
        if mark.name in ("skip", "skipif", "xfail", "usefixtures"):
            found.append(f"{check_name(item)} is marked {mark.name}")
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    for name in _OWN_FIXTURES:
        for definition in definitions.get(name, ())[-1:]:
            module = str(getattr(definition.func, "__module__", ""))
            if not module.startswith(("anydevice_conformance", "_pytest")):
                found.append(f"fixture {name!r} comes from {module}")
    return found
