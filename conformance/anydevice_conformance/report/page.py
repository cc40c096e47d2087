"""The report as a page: one HTML file with nothing to fetch, for a person to read."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from anydevice.text import format_bytes
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.report.html_parts import (
    ORDER,
    TONES,
    Result,
    bar,
    code,
    count,
    escaped,
    list_of,
    paragraph_link,
    state_of,
)
from anydevice_conformance.report.page_fixes import command, fixes
from anydevice_conformance.report.verdict import scope
from anydevice_conformance.specification import GROUPS, load_specification
from anydevice_conformance.statuses import Status

__all__ = ["page"]

_VERDICTS: Final = {
    "certified": (
        "var(--passed)",
        "Every check that this machine can run passed, and none was left out.",
    ),
    "passed, not certified": (
        "var(--known)",
        "Nothing failed, but this was not a full run of the suite: no certificate.",
    ),
    "passed on a simulator": (
        "var(--hardware)",
        "Every check passed, on devices that are simulated: that says nothing of any hardware.",
    ),
    "passed with known failures": (
        "var(--known)",
        "All that failed is on the vendor's list of known failures: no certificate.",
    ),
    "failed": ("var(--failed)", "The backend breaks the specification. What to fix stands below."),
    "error": (
        "var(--error)",
        "The suite itself broke, or the list of known failures is wrong: nothing is proved.",
    ),
    "no hardware": (
        "var(--hardware)",
        "This machine has no device of the type. That is not a pass: run it where one is.",
    ),
}


def page(report: Mapping[str, Any]) -> str:
    """Draw the report."""
    stamps = report["stamps"]
    title = f"anydevice conformance: {stamps.get('device_type', '?')}"
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    parts = [
        _hero(report),
        _claims(report),
        _reasons(report),
        fixes(report),
        _flags(report),
        _groups(report),
        _unseen(report["results"]),
        _timings(report["results"]),
        _stamps(report),
        _paragraphs(report["results"]),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}: {escaped(report['verdict'])}</title>\n"
        f"<style>\n{style}</style></head>\n"
        f"<body><main>\n{''.join(part for part in parts if part)}"
        "<footer>The report's data are in report.json next to this page; "
        "<code>anydevice certify --check report.json</code> checks that they agree with themselves."
        "</footer></main></body></html>\n"
    )


def _legend(counts: Counter[str]) -> str:
    items = [
        f'<li><span class="dot" style="background:{TONES[s]}"></span>{counts[s]} {s}</li>'
        for s in ORDER
        if counts[s]
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _hero(report: Mapping[str, Any]) -> str:
    stamps, counts = report["stamps"], count(report["results"])
    tone, lede = _VERDICTS[report["verdict"]]
    plugin = stamps.get("plugin", {})
    devices = stamps.get("devices", [])
    package = f"{plugin.get('distribution', '?')} {plugin.get('version', '')}"
    when = str(stamps.get("started", "?")).replace("T", " ").replace("+00:00", " UTC")
    names = Counter(device["name"] for device in devices)
    shown = [f"{n} &times; {escaped(name)}" for name, n in names.items()]
    if len(shown) == len(devices):  # each has a name of its own
        shown = [escaped(name) for name in names]
    return f"""<section class="card hero" style="--tone:{tone}">
<p class="eyebrow">anydevice backend specification {escaped(report["spec"])}</p>
<h1><code>{escaped(stamps.get("device_type", "?"))}</code>: \
<span class="word">{escaped(report["verdict"])}</span>{escaped(scope(report))}</h1>
<p class="lede">{lede}</p>
{bar(counts)}{_legend(counts)}
<h2>Tried on</h2>
<dl class="facts">
<div><dt>Devices</dt><dd>{", ".join(shown) or "no device"}</dd></div>
<div><dt>Package</dt><dd>{escaped(package)}</dd></div>
<div><dt>Driver</dt><dd>{escaped(stamps.get("driver") or "not told")}</dd></div>
<div><dt>torch</dt><dd>{escaped(stamps.get("torch", "?"))}</dd></div>
<div><dt>When</dt><dd>{escaped(when)}</dd></div>
<div><dt>Took</dt><dd>{stamps.get("seconds", 0):.0f} s</dd></div>
</dl></section>
"""


def _reasons(report: Mapping[str, Any]) -> str:
    """Why there is no certificate, but for the failures, which come by themselves."""
    shown = [r for r in report["because"] if not r.endswith((" failed", " is a known failure"))]
    if not shown:
        return ""
    reasons = list_of(map(escaped, shown))
    return f'<h2>Why there is no certificate</h2><div class="card">{reasons}</div>\n'


def _flags(report: Mapping[str, Any]) -> str:
    if not report["flags"]:
        return ""
    items = [escaped(flag["message"]) for flag in report["flags"]]
    return f'<h2>Works, but is not claimed</h2><div class="card">{list_of(items)}</div>\n'


def _claims(report: Mapping[str, Any]) -> str:
    """What the backend claims, what it does not, and what was therefore not checked."""
    rows = []
    for name, entry in report["stamps"].get("capabilities", {}).items():
        works = "works all the same" if entry["works"] and not entry["claimed"] else ""
        word = "claimed" if entry["claimed"] else f"not claimed{works and ', '}{works}"
        rows.append(f"<tr><td><code>{escaped(name)}</code></td><td>{word}</td></tr>")
    reasons: dict[str, list[str]] = {}
    for result in report["results"]:
        if result["status"] == "not claimed":
            why = (result["message"].splitlines() or ["it does not say why"])[0][:200]
            reasons.setdefault(why, []).append(result["paragraph"])
    items = [
        f"{escaped(why)}: {', '.join(paragraph_link(p) for p in dict.fromkeys(paragraphs))}"
        for why, paragraphs in reasons.items()
    ]
    unseen = f"<p>Not checked, since it is not claimed:</p>{list_of(items)}" if items else ""
    if not rows and not items:
        return ""
    return (
        f'<h2>What it claims</h2><div class="card"><table>{"".join(rows)}</table>{unseen}</div>\n'
    )


def _paragraphs(results: Sequence[Result]) -> str:
    """The specification's paragraphs, as this version has them: what the ids link to."""
    seen = {result["paragraph"] for result in results}
    items = [
        f'<p id="{p.id}"><span class="id">{p.id}</span><b>{code(p.title)}.</b> '
        f'{code(p.statement)} <span class="why">{code(p.reason)}</span></p>'
        for p in load_specification().values()
        if p.id in seen
    ]
    return f'<h2>The paragraphs</h2><div class="card paragraphs">{"".join(items)}</div>\n'


def _groups(report: Mapping[str, Any]) -> str:
    parts = []
    for prefix, title in GROUPS.items():
        mine = [r for r in report["results"] if r["paragraph"].startswith(prefix)]
        if mine:
            parts.append(_group(report, title, mine))
    return f"<h2>All checks</h2>\n{''.join(parts)}"


def _group(report: Mapping[str, Any], title: str, results: Sequence[Result]) -> str:
    counts = count(results)
    seconds = sum(r["seconds"] for r in results)
    opened = " open" if counts["failed"] or counts["error"] else ""
    rows = "".join(_row(report, result) for result in results)
    return f"""<details class="group"{opened}><summary><h3>{title}</h3>{bar(counts)}\
<span class="count">{counts["passed"]} of {len(results)} · {seconds:.1f} s</span></summary>
<div class="inner"><table>{rows}</table></div></details>
"""


def _row(report: Mapping[str, Any], result: Result) -> str:
    check, state = load_catalogue()[result["check"]], state_of(result)
    runs = len(result["cases"])
    note = (
        result["message"].splitlines()[0][:240] if result["message"] and state != "passed" else ""
    )
    why = f'<p class="why">{escaped(note)}</p>' if note else ""
    times = f" · {runs} runs" if runs > 1 else ""
    # A failure has its place above; the row of any other check is its place.
    bad = Status.parse(result["status"]) >= Status.FAILED
    anchor = "" if bad else f' id="{escaped(check.name)}"'
    alone = f"<details class=rest><summary>Run it alone</summary>{command(report, check.name)}"
    return (
        f'<tr{anchor}><td class="state">'
        f'<span class="dot" style="background:{TONES[state]}"></span>'
        f"{state}</td><td>{paragraph_link(check.paragraph)}{code(check.title)}{why}{alone}</details></td>"
        f'<td class="num">{result["seconds"]:.2f} s{times}</td></tr>\n'
    )


def _unseen(results: Sequence[Result]) -> str:
    """What this run says nothing about."""
    rows = [
        f"<tr><td><span class=id>{r['paragraph']}</span>"
        f"{code(load_catalogue()[r['check']].title)}</td>"
        f"<td class=state>{r['status']}</td>"
        f"<td>{_unbroken(r['message'].splitlines()[0][:200])}</td></tr>\n"
        for r in results
        if r["status"] in ("no hardware", "skipped") and r["message"]
    ]
    if not rows:
        return ""
    head = "<tr><th>Paragraph</th><th></th><th>Because</th></tr>"
    return (
        f'<h2>Not verified on this machine</h2><div class="card"><table>{head}{"".join(rows)}'
        "</table></div>\n"
    )


def _unbroken(text: str) -> str:
    """Escaped; an option such as ``--quick`` stays on one line."""
    return escaped(text).replace("--", "&#8209;&#8209;")


def _timings(results: Sequence[Result]) -> str:
    slowest = sorted(results, key=lambda r: -r["seconds"])[:8]
    if not slowest or slowest[0]["seconds"] <= 0:
        return ""
    longest = slowest[0]["seconds"]
    rows = [
        f"<span><code>{escaped(r['check'].removeprefix('test_'))}</code></span>"
        f'<span class="track"><b style="width:{100 * r["seconds"] / longest:.1f}%"></b></span>'
        f"<span>{r['seconds']:.2f} s</span>"
        for r in slowest
    ]
    return f'<h2>Slowest checks</h2><div class="card times">{"".join(rows)}</div>\n'


def _stamps(report: Mapping[str, Any]) -> str:
    stamps = report["stamps"]
    devices = [
        f"{d['index']}: {d['name']}" + (f", {format_bytes(d['total'])}" if d["total"] else "")
        for d in stamps.get("devices", [])
    ]
    facts = {
        "Command": f"<code>{escaped(shlex.join(stamps.get('command', [])))}</code>",
        "Specification": escaped(report["spec"]),
        "Suite": f"{escaped(report['suite'])} ({escaped(stamps.get('suite_digest', '?'))})",
        "anydevice": escaped(stamps.get("anydevice", "?")),
        "Python": escaped(stamps.get("python", "?")),
        "System": escaped(stamps.get("platform", "?")),
        "Seed of the examples": escaped(stamps.get("seed", "?")),
        "Simulated": "yes" if stamps.get("simulated") else "no",
        "Devices": "<br>".join(map(escaped, devices)) or "none",
    }
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    return f'<h2>Stamps</h2><div class="card"><table>{rows}</table></div>\n'
