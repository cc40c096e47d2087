"""From results to a verdict. `decide` reads only the report's data, so it can be checked again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from anydevice_conformance.catalogue import load_catalogue, suite_digest
from anydevice_conformance.report.advice import is_stale
from anydevice_conformance.specification import GROUP_CAPABILITY, GROUPS
from anydevice_conformance.statuses import Status

__all__ = ["Verdict", "decide", "scope"]

CERTIFIED: Final = "certified"
PASSED: Final = "passed, not certified"
KNOWN: Final = "passed with known failures"
FAILED: Final = "failed"
ERROR: Final = "error"
NO_HARDWARE: Final = "no hardware"
SIMULATED: Final = "passed on a simulator"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a run is worth.

    Attributes:
        word: ``certified``; ``passed, not certified`` (quick, or tampered with); ``passed with
        known
            failures``; ``passed on a simulator``; ``failed``; ``error``; ``no hardware``.
        certified: whether the certificate is given.
        because: why not, one reason a line; empty when it is given.
    """

    word: str
    certified: bool
    because: list[str]

    @property
    def exit_code(self) -> int:
        """Of ``anydevice certify``: 0 for all that passed, 1 else."""
        return 0 if self.word in (CERTIFIED, PASSED, KNOWN, SIMULATED) else 1


def decide(report: Mapping[str, Any]) -> Verdict:
    """Read the verdict off a report's results and stamps."""
    results, stamps = report["results"], report["stamps"]
    by_status: dict[Status, list[Any]] = {status: [] for status in Status}
    for result in results:
        by_status[Status.parse(result["status"])].append(result)
    unknown = [r for r in by_status[Status.FAILED] if r["known"] is None]
    known = [r for r in by_status[Status.FAILED] if r["known"] is not None]
    # a stale known failure is an error, too; `problems` tells of it
    broken = [r for r in by_status[Status.ERROR] if not is_stale(r)]
    because = [f"the suite broke in {r['check']}" for r in broken]
    because += list(report["problems"])
    because += [f"{r['check']} failed" for r in unknown]
    because += [f"{r['check']} is a known failure" for r in known]
    tampering = _tampering(report)
    because += tampering
    bare = _groups_without_a_pass(results)
    because += [f"nothing passed in {group}" for group in bare]

    if by_status[Status.ERROR] or report["problems"]:
        word = ERROR
    elif unknown:
        word = FAILED
    elif not stamps.get("devices"):
        word = NO_HARDWARE
        why = stamps.get("no_device_because")
        because.insert(0, f"no device of the type here{f': {why}' if why else ''}")
    elif known:
        word = KNOWN
    elif because:
        word = PASSED
    elif stamps.get("simulated"):
        word = SIMULATED
        because.append("this was a simulator: a certificate is for hardware")
    else:
        word = CERTIFIED
    return Verdict(word, word == CERTIFIED, because)


def _tampering(report: Mapping[str, Any]) -> list[str]:
    """What keeps a run without failures from being a full run of this suite."""
    found = [f"{name} was deselected" for name in report["deselected"]]
    found += [f"override: {what}" for what in report["overrides"]]
    seen = {result["check"] for result in report["results"]}
    missing = [n for n in load_catalogue() if n not in seen and n not in report["deselected"]]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        found.append(f"not run: {', '.join(missing[:3])}{more}")
    if report["stamps"].get("quick"):
        found.append("--quick leaves checks out")
    if report["stamps"].get("assumed"):
        found.append("capabilities were assumed that are not claimed")
    if report["stamps"].get("suite_digest") not in (None, suite_digest()):
        found.append("the suite that ran is not the suite of this version")
    return found


def _groups_without_a_pass(results: list[Mapping[str, Any]]) -> list[str]:
    """The groups that every backend needs, and in which no check passed."""
    passed = {r["paragraph"][:3] for r in results if r["status"] == Status.PASSED.text}
    return [GROUPS[g] for g in GROUPS if g not in passed and g not in GROUP_CAPABILITY]


def scope(report: Mapping[str, Any]) -> str:
    """On how much it was tried: ``" on 2 devices"``, ``" on 1 simulated device"``, or nothing."""
    stamps = report["stamps"]
    count = len(stamps.get("devices", []))
    if not count:
        return ""
    kind = "simulated " if stamps.get("simulated") else ""
    return f" on {count} {kind}device{'s' if count > 1 else ''}"
