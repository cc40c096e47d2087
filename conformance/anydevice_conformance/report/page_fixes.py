"""What to fix, on the report's page: each failure, its reason, and how to run the check again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from anydevice_conformance.report import advice
from anydevice_conformance.report.html_parts import (
    TONES,
    Result,
    code,
    escaped,
    paragraph_link,
    state_of,
)
from anydevice_conformance.specification import load_specification
from anydevice_conformance.statuses import Status

__all__ = ["command", "fixes"]


def fixes(report: Mapping[str, Any]) -> str:
    """The section on what to fix; nothing where nothing failed."""
    bad = [r for r in report["results"] if Status.parse(r["status"]) >= Status.FAILED]
    if not bad:
        return ""
    # The results are in the specification's order: causes come before symptoms.
    bad.sort(key=lambda r: r["known"] is not None)
    failed = advice.bad_paragraphs(report)
    return f"<h2>What to fix</h2>\n{''.join(_fix(report, r, failed) for r in bad)}"


def _place(case: str) -> str:
    """A case as a person says it: ``"device 0, transposed"`` for ``"0-transposed"``."""
    match = re.fullmatch(r"(\d+)(?:-(.*))?", case)
    if match is None:
        return case
    return f"device {match[1]}, {match[2]}" if match[2] else f"device {match[1]}"


def _found_here(message: str) -> str:
    """The first line of a message and the counterexample; the rest folded."""
    lines = message.splitlines() or [""]
    examples = [line.partition(": ")[2] for line in lines if line.startswith("counterexample: ")]
    rest = "\n".join(lines[1:])
    example = (
        f'<p><span class="label">Counterexample</span><code>{escaped(examples[0])}</code></p>'
        if examples
        else ""
    )
    folded = f"<details class=rest><summary>All of it</summary><pre>{escaped(rest)}</pre></details>"
    return f"<pre>{escaped(lines[0])}</pre>{example}{folded if rest.strip() else ''}"


def command(report: Mapping[str, Any], check: str) -> str:
    """What runs a check alone, on the same examples."""
    stamps = report["stamps"]
    words = ["pytest", "--pyargs", "anydevice_conformance", "-k", check]
    words += ["--anydevice-backend", str(stamps.get("device_type", "?"))]
    if stamps.get("quick"):
        words.append("--anydevice-quick")
    if stamps.get("seed"):
        words += ["--anydevice-seed", str(stamps["seed"])]
    if stamps.get("examples"):
        words += ["--anydevice-examples", str(stamps["examples"])]
    return f'<code class="copy">{escaped(shlex.join(words))}</code>'


def _fix(report: Mapping[str, Any], result: Result, failed: set[str]) -> str:
    paragraph, state = load_specification()[result["paragraph"]], state_of(result)
    faulty = [c for c in result["cases"] if c["status"] == result["status"]]
    cases = [_place(c["case"]) for c in faulty if c["case"]]
    where = f"<p><span class=label>In</span>{escaped(', '.join(cases[:12]))}</p>" if cases else ""
    known = result["known"]
    excuse = (
        f'<p><span class="label">Known</span>{escaped(known["reason"])} '
        f'(<a href="{escaped(known["link"])}">{escaped(known["link"])}</a>)</p>'
        if known
        else ""
    )
    return f"""<section class="card fix" style="--tone:{TONES[state]}">
<h3 id="{escaped(result["check"])}">{paragraph_link(paragraph.id)}{code(paragraph.title)}</h3>
<p>{code(paragraph.statement)}</p><p class="why">Why: {code(paragraph.reason)}</p>
{excuse}<p><span class="label">Found</span>{code(advice.found(result))}</p>{where}
{_found_here(result["message"])}
<p><span class="label">Fix</span>{code(advice.fix(result, failed))}</p>
<p class="why"><span class="label">Run it</span>{command(report, result["check"])}</p></section>
"""
