"""What to do about a result that is bad."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.statuses import Status, highest

__all__ = ["bad_paragraphs", "fix", "found", "is_stale"]

_IDS: Final = re.compile(r"[A-Z]{3}-\d{3}(?: to [A-Z]{3}-\d{3})?")


def is_stale(result: Mapping[str, Any]) -> bool:
    """Whether it is an error only since it passes, and the known failures say that it fails."""
    runs = highest(Status.parse(case["status"]) for case in result["cases"])
    return result["status"] == Status.ERROR.text and runs is Status.PASSED


def bad_paragraphs(report: Mapping[str, Any]) -> set[str]:
    """The paragraphs of which a check failed or broke."""
    return {r["paragraph"] for r in report["results"] if Status.parse(r["status"]) >= Status.FAILED}


def found(result: Mapping[str, Any]) -> str:
    """What the check found, in general words; what it found here is the result's message."""
    if is_stale(result):
        return "the backend is right, and the list of known failures is out of date."
    return load_catalogue()[result["check"]].found


def fix(result: Mapping[str, Any], bad: Collection[str] = ()) -> str:
    """What to do then.

    Args:
        result: that is bad.
        bad: the paragraphs that failed in this run: advice leads to no other.
    """
    if is_stale(result):
        return "remove the entry from the file of known failures."
    text = load_catalogue()[result["check"]].fix
    if not text.startswith("see ") or not _IDS.search(text):
        return text
    first, _, rest = text.partition(";")
    causes = [name for name in _named(first) if name in bad]
    if causes:
        return f"mend {', '.join(causes)} first: this rests on it."
    return rest.strip().removeprefix("else ") or (
        "report it to anydevice: nothing that it rests on failed."
    )


def _named(text: str) -> list[str]:
    """The ids in a text, with those between two that are joined by "to"."""
    names: list[str] = []
    for piece in _IDS.findall(text):
        first, _, last = piece.partition(" to ")
        group, low, high = first[:3], int(first[4:]), int((last or first)[4:])
        names += [f"{group}-{number:03}" for number in range(low, high + 1)]
    return names
