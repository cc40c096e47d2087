"""What to do about a result that is bad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.statuses import Status, highest

__all__ = ["fix", "found", "is_stale"]


def is_stale(result: Mapping[str, Any]) -> bool:
    """Whether it is an error only since it passes, and the known failures say that it fails."""
    runs = highest(Status.parse(case["status"]) for case in result["cases"])
    return result["status"] == Status.ERROR.text and runs is Status.PASSED


def found(result: Mapping[str, Any]) -> str:
    """What the check found, in general words; what it found here is the result's message."""
    if is_stale(result):
        return "the backend is right, and the list of known failures is out of date."
    return load_catalogue()[result["check"]].found


def fix(result: Mapping[str, Any]) -> str:
    """What to do then."""
    if is_stale(result):
        return "remove the entry from the file of known failures."
    return load_catalogue()[result["check"]].fix
