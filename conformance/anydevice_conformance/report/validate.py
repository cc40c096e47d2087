"""Is a report what it says it is? Its schema, and its consistency."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from anydevice_conformance._version import SPEC_VERSION, SUITE_VERSION
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.report.verdict import decide
from anydevice_conformance.statuses import Status, highest

__all__ = ["SCHEMA_FILE", "load_schema", "validate"]

SCHEMA_FILE: Final = Path(__file__).with_name("report.schema.json")


def load_schema() -> dict[str, Any]:
    """The JSON schema of a report."""
    schema: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return schema


def validate(report: Any) -> list[str]:
    """All that is wrong with a report; nothing when it can be believed.

    A report is a statement, not a proof: it can be forged as any file can. What is checked is that
    it has the schema's form, names this suite's checks and all of them, and that each status and
    the verdict follow from what it records.
    """
    import jsonschema

    validator = jsonschema.Draft202012Validator(load_schema())
    faults = [
        f"{'/'.join(str(p) for p in error.absolute_path) or 'report'}: {error.message[:200]}"
        for error in validator.iter_errors(report)
    ]
    if faults:
        return faults
    return [*_versions(report), *_results(report), *_verdict(report)]


def _versions(report: Mapping[str, Any]) -> list[str]:
    faults = []
    if report["spec"] != SPEC_VERSION:
        faults.append(f"spec {report['spec']} is not {SPEC_VERSION}, which is installed here")
    if report["suite"] != SUITE_VERSION:
        faults.append(f"suite {report['suite']} is not {SUITE_VERSION}, which is installed here")
    return faults


def _results(report: Mapping[str, Any]) -> list[str]:
    catalogue, faults = load_catalogue(), []
    seen: set[str] = set()
    stale = {p for p in report["problems"] if p.endswith("passes now: take it off the list")}
    for result in report["results"]:
        name = result["check"]
        if name in seen:
            faults.append(f"{name} comes twice")
        seen.add(name)
        if name not in catalogue:
            faults.append(f"{name} is no check of this suite")
            continue
        if catalogue[name].paragraph != result["paragraph"]:
            faults.append(f"{name} is for {catalogue[name].paragraph}, not {result['paragraph']}")
        expected = highest(Status.parse(case["status"]) for case in result["cases"])
        raised = result["status"] == Status.ERROR.text and stale
        if expected.text != result["status"] and not raised:
            faults.append(f"{name} is {result['status']!r}, its cases make it {expected.text!r}")
        if result["known"] is not None and result["status"] != Status.FAILED.text:
            faults.append(f"{name} is a known failure, and {result['status']!r}")
    listed = {entry["name"] for entry in report["known_failures"]}
    for result in report["results"]:
        if result["known"] is not None and not listed & {result["check"], result["paragraph"]}:
            faults.append(f"{result['check']} is excused by no known failure")
    missing = [n for n in catalogue if n not in seen and n not in report["deselected"]]
    faults += [f"{name} is missing" for name in missing]
    return faults


def _verdict(report: Mapping[str, Any]) -> list[str]:
    verdict, faults = decide(report), []
    if verdict.word != report["verdict"]:
        faults.append(f"verdict is {report['verdict']!r}; the results make it {verdict.word!r}")
    if verdict.certified != report["certified"]:
        faults.append(
            f"certified is {report['certified']}; the results make it {verdict.certified}"
        )
    if verdict.because != report["because"]:
        faults.append("because: the reasons are not those that follow from the results")
    return faults
