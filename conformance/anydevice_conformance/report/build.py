"""From the events of a run to the report's data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from anydevice_conformance._version import SPEC_VERSION, SUITE_VERSION
from anydevice_conformance.catalogue import Check, load_catalogue
from anydevice_conformance.report.verdict import decide
from anydevice_conformance.statuses import Status, highest

__all__ = ["SCHEMA_VERSION", "build"]

#: Raised when a reader of an older report would misread a newer one.
SCHEMA_VERSION = 1


def build(
    events: Iterable[Mapping[str, Any]],
    known: Mapping[str, Mapping[str, str]] | None = None,
    complaints: Iterable[str] = (),
) -> dict[str, Any]:
    """Make the report of a run.

    Args:
        events: the journal's.
        known: the vendor's known failures: check or paragraph to ``reason`` and ``link``.
        complaints: what was wrong with the file of known failures.
    """
    events = list(events)
    stamps: dict[str, Any] = {}
    for event in events:
        if event["event"] == "stamps":
            stamps.update({k: v for k, v in event.items() if k != "event"})
    catalogue = load_catalogue()
    results = [_result(check, events) for check in catalogue.values() if _was_seen(check, events)]
    known = known or {}
    problems = list(complaints) + _apply_known(results, known)
    report: dict[str, Any] = {
        "schema": SCHEMA_VERSION,
        "spec": SPEC_VERSION,
        "suite": SUITE_VERSION,
        "stamps": stamps,
        "results": results,
        "known_failures": [{"name": name, **entry} for name, entry in sorted(known.items())],
        "problems": problems,
        "deselected": _names(events, "deselected"),
        "overrides": sorted({e["what"] for e in events if e["event"] == "override"}),
        "flags": [
            {"what": e["what"], "message": e["message"]} for e in events if e["event"] == "flag"
        ],
    }
    verdict = decide(report)
    report["verdict"] = verdict.word
    report["certified"] = verdict.certified
    report["because"] = verdict.because
    return report


def _names(events: list[Mapping[str, Any]], kind: str) -> list[str]:
    return sorted({name for e in events if e["event"] == kind for name in e["checks"]})


def _was_seen(check: Check, events: list[Mapping[str, Any]]) -> bool:
    return any(e["event"] == "result" and e["check"] == check.name for e in events)


def _result(check: Check, events: list[Mapping[str, Any]]) -> dict[str, Any]:
    runs = [e for e in events if e["event"] == "result" and e["check"] == check.name]
    cases = [
        {
            "case": run["case"],
            "status": run["status"],
            "message": run["message"],
            "seconds": run["seconds"],
        }
        for run in runs
    ]
    status = highest(Status.parse(case["status"]) for case in cases)
    messages = [c["message"] for c in cases if c["status"] == status.text and c["message"]]
    return {
        "check": check.name,
        "paragraph": check.paragraph,
        "status": status.text,
        "message": messages[0] if messages else "",
        "seconds": round(sum(case["seconds"] for case in cases), 4),
        "known": None,
        "cases": cases,
    }


def _apply_known(
    results: list[dict[str, Any]], known: Mapping[str, Mapping[str, str]]
) -> list[str]:
    """Mark known failures; a stale entry makes its checks errors."""
    problems = []
    for name, entry in known.items():
        named = [r for r in results if name in (r["check"], r["paragraph"])]
        all_names = {c.name for c in load_catalogue().values()} | {
            c.paragraph for c in load_catalogue().values()
        }
        if name not in all_names:
            problems.append(f"known failure {name!r} names no check and no paragraph")
            continue
        failing = [r for r in named if r["status"] == Status.FAILED.text]
        for result in failing:
            result["known"] = {"reason": entry["reason"], "link": entry["link"]}
        if not failing and any(r["status"] == Status.PASSED.text for r in named):
            stale = f"known failure {name!r} passes now: take it off the list"
            problems.append(stale)
            for result in named:
                if result["status"] == Status.PASSED.text:
                    result["status"] = Status.ERROR.text
                    result["message"] = stale
    return problems
