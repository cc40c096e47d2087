"""The report as JUnit XML, for continuous integration."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from typing import Any

from anydevice_conformance.specification import GROUPS
from anydevice_conformance.statuses import Status

__all__ = ["junit"]

#: What XML 1.0 cannot hold.
_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(report: Mapping[str, Any]) -> str:
    """A ``testsuites`` document: a suite for each group, a case for each check."""
    results, device_type = report["results"], report["stamps"].get("device_type", "")
    root = ElementTree.Element("testsuites", name=f"anydevice conformance of {device_type}")
    for prefix, title in GROUPS.items():
        mine = [r for r in results if r["paragraph"].startswith(prefix)]
        if mine:
            _suite(root, title, mine)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _suite(root: ElementTree.Element, title: str, results: list[Mapping[str, Any]]) -> None:
    statuses = [Status.parse(result["status"]) for result in results]
    failures = [
        s is Status.FAILED and r["known"] is None for s, r in zip(statuses, results, strict=True)
    ]
    known = [r["known"] is not None for r in results]
    suite = ElementTree.SubElement(
        root,
        "testsuite",
        name=title,
        tests=str(len(results)),
        failures=str(sum(failures)),
        errors=str(sum(s is Status.ERROR for s in statuses)),
        skipped=str(sum(s < Status.PASSED for s in statuses) + sum(known)),
        time=f"{sum(r['seconds'] for r in results):.3f}",
    )
    for result, status in zip(results, statuses, strict=True):
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"anydevice_conformance.{title.replace(' ', '_').lower()}",
            name=result["check"],
            time=f"{result['seconds']:.3f}",
        )
        message = _ILLEGAL.sub("?", result["message"])
        if result["known"] is not None:
            reason = f"known failure: {result['known']['reason']} ({result['known']['link']})"
            ElementTree.SubElement(case, "skipped", message=reason)
        elif status is Status.FAILED:
            ElementTree.SubElement(case, "failure", message=message[:300]).text = message
        elif status is Status.ERROR:
            ElementTree.SubElement(case, "error", message=message[:300]).text = message
        elif status < Status.PASSED:
            ElementTree.SubElement(case, "skipped", message=f"{status.text}: {message[:300]}")
