"""What a person sees in the terminal while the suite runs, and at its end."""

from __future__ import annotations

import collections
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from anydevice_conformance.report import advice
from anydevice_conformance.report.verdict import scope
from anydevice_conformance.specification import GROUPS
from anydevice_conformance.statuses import Status, highest

__all__ = ["Progress", "summary"]


class Progress:
    """Prints a line for each group when it is through, and each failure at once."""

    def __init__(self) -> None:
        self._group: str | None = None
        self._statuses: dict[str, list[Status]] = {}
        self._told: set[str] = set()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one result."""
        check = str(event["check"])
        group = check[5:8]
        if group != self._group:
            self.close()
            self._group = group
        status = Status.parse(event["status"])
        self._statuses.setdefault(check, []).append(status)
        if status >= Status.FAILED and check not in self._told:
            self._told.add(check)
            first = event["message"].splitlines()[0] if event["message"] else ""
            print(f"  {status.text.upper()} {check}: {first[:160]}", flush=True)

    def close(self) -> None:
        """Print the line of the group that is through."""
        if self._group is None:
            return
        counts = collections.Counter(highest(s) for s in self._statuses.values())
        words = ", ".join(f"{counts[s]} {s.text}" for s in reversed(Status) if counts[s])
        print(f"{GROUPS.get(self._group, self._group):20} {words}", flush=True)
        self._statuses.clear()
        self._group = None


def summary(report: Mapping[str, Any], folder: Path) -> str:
    """The verdict, what to fix, and where the report is."""
    lines = [""]
    failed = advice.bad_paragraphs(report)
    bad = [r for r in report["results"] if Status.parse(r["status"]) >= Status.FAILED]
    for result in bad:
        lines.append(f"{result['status'].upper()} {result['paragraph']} {result['check']}")
        lines += [f"    {line}" for line in result["message"].splitlines()[:4]]
        lines.append(f"    Fix: {advice.fix(result, failed)}")
    lines += [f"FLAG {flag['message']}" for flag in report["flags"]]
    colour = {"certified": "\033[32m", "failed": "\033[31m", "error": "\033[31m"}
    mark, end = (
        (colour.get(report["verdict"], "\033[33m"), "\033[0m") if sys.stdout.isatty() else ("", "")
    )
    lines.append(f"\nVerdict: {mark}{report['verdict']}{end}{scope(report)}")
    lines += _unclaimed(report)
    if not bad:
        lines += [f"    {reason}" for reason in report["because"][:8]]
    lines.append(f"{report['stamps']['seconds']:.1f} s. Report: {folder / 'report.html'}")
    return "\n".join(lines)


def _unclaimed(report: Mapping[str, Any]) -> list[str]:
    """What the verdict does not speak of."""
    entries = report["stamps"].get("capabilities", {})
    names = [name for name, entry in entries.items() if not entry["claimed"]]
    return [f"    not claimed, so not checked: {', '.join(names)}"] if names else []
