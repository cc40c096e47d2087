"""The report as a page: one HTML file with nothing to fetch, for a person to read."""

from __future__ import annotations

import html
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from anydevice.text import format_bytes
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.report import advice
from anydevice_conformance.report.verdict import scope
from anydevice_conformance.specification import GROUPS, load_specification
from anydevice_conformance.statuses import Status

__all__ = ["page"]

Result = Mapping[str, Any]

_TONES: Final = {
    "passed": "var(--passed)",
    "failed": "var(--failed)",
    "error": "var(--error)",
    "known failure": "var(--known)",
    "skipped": "var(--skipped)",
    "not claimed": "var(--claim)",
    "no hardware": "var(--hardware)",
}
_ORDER: Final = tuple(_TONES)
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
        _fixes(report),
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
        f"<title>{_(title)}: {_(report['verdict'])}</title>\n<style>\n{style}</style></head>\n"
        f"<body><main>\n{''.join(part for part in parts if part)}"
        "<footer>The report's data are in report.json beside this page; "
        "<code>anydevice certify --check report.json</code> checks that they agree with themselves."
        "</footer></main></body></html>\n"
    )


def _(value: object) -> str:
    return html.escape(str(value))


def _state(result: Result) -> str:
    known = result.get("known") is not None and result["status"] == "failed"
    return "known failure" if known else str(result["status"])


def _count(results: Iterable[Result]) -> Counter[str]:
    return Counter(_state(result) for result in results)


def _bar(counts: Counter[str]) -> str:
    pieces = [
        f'<i style="flex:{counts[s]};background:{_TONES[s]}" title="{counts[s]} {s}"></i>'
        for s in _ORDER
        if counts[s]
    ]
    return f'<div class="bar">{"".join(pieces)}</div>'


def _legend(counts: Counter[str]) -> str:
    items = [
        f'<li><span class="dot" style="background:{_TONES[s]}"></span>{counts[s]} {s}</li>'
        for s in _ORDER
        if counts[s]
    ]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _hero(report: Mapping[str, Any]) -> str:
    stamps, counts = report["stamps"], _count(report["results"])
    tone, lede = _VERDICTS[report["verdict"]]
    plugin = stamps.get("plugin", {})
    devices = stamps.get("devices", [])
    package = f"{plugin.get('distribution', '?')} {plugin.get('version', '')}"
    when = str(stamps.get("started", "?")).replace("T", " ").replace("+00:00", " UTC")
    names = ", ".join(dict.fromkeys(device["name"] for device in devices)) or "no device"
    return f"""<section class="card hero" style="--tone:{tone}">
<p class="eyebrow">anydevice backend specification {_(report["spec"])}</p>
<h1><code>{_(stamps.get("device_type", "?"))}</code>: \
<span class="word">{_(report["verdict"])}</span>{_(scope(report))}</h1>
<p class="lede">{lede}</p>
{_bar(counts)}{_legend(counts)}
<h2>Tried on</h2>
<dl class="facts">
<div><dt>Devices</dt><dd>{len(devices)} &times; {_(names)}</dd></div>
<div><dt>Package</dt><dd>{_(package)}</dd></div>
<div><dt>Driver</dt><dd>{_(stamps.get("driver") or "not told")}</dd></div>
<div><dt>torch</dt><dd>{_(stamps.get("torch", "?"))}</dd></div>
<div><dt>When</dt><dd>{_(when)}</dd></div>
<div><dt>Took</dt><dd>{stamps.get("seconds", 0):.0f} s</dd></div>
</dl></section>
"""


def _list(items: Iterable[str]) -> str:
    return f'<ul class="plain">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def _reasons(report: Mapping[str, Any]) -> str:
    """Why there is no certificate, but for the failures, which come by themselves."""
    shown = [r for r in report["because"] if not r.endswith((" failed", " is a known failure"))]
    if not shown:
        return ""
    return f'<h2>Why there is no certificate</h2><div class="card">{_list(map(_, shown))}</div>\n'


def _fixes(report: Mapping[str, Any]) -> str:
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
        f'<p><span class="label">Counterexample</span><code>{_(examples[0])}</code></p>'
        if examples
        else ""
    )
    folded = f"<details class=rest><summary>All of it</summary><pre>{_(rest)}</pre></details>"
    return f"<pre>{_(lines[0])}</pre>{example}{folded if rest.strip() else ''}"


def _command(report: Mapping[str, Any], check: str) -> str:
    """What runs a check alone, on the same examples."""
    stamps = report["stamps"]
    words = ["pytest", "--pyargs", "anydevice_conformance", "-k", check]
    words += ["--anydevice-backend", str(stamps.get("device_type", "?"))]
    if stamps.get("seed"):
        words += ["--anydevice-seed", str(stamps["seed"])]
    if stamps.get("examples"):
        words += ["--anydevice-examples", str(stamps["examples"])]
    return f'<code class="copy">{_(shlex.join(words))}</code>'


def _paragraph(identity: str) -> str:
    return f'<a class="id" href="#{identity}">{identity}</a>'


def _fix(report: Mapping[str, Any], result: Result, failed: set[str]) -> str:
    paragraph, state = load_specification()[result["paragraph"]], _state(result)
    faulty = [c for c in result["cases"] if c["status"] == result["status"]]
    cases = [_place(c["case"]) for c in faulty if c["case"]]
    where = f"<p><span class=label>In</span>{_(', '.join(cases[:12]))}</p>" if cases else ""
    known = result["known"]
    excuse = (
        f'<p><span class="label">Known</span>{_(known["reason"])} '
        f'(<a href="{_(known["link"])}">{_(known["link"])}</a>)</p>'
        if known
        else ""
    )
    return f"""<section class="card fix" style="--tone:{_TONES[state]}">
<h3 id="{_(result["check"])}">{_paragraph(paragraph.id)}{_code(paragraph.title)}</h3>
<p>{_code(paragraph.statement)}</p><p class="why">Why: {_code(paragraph.reason)}</p>
{excuse}<p><span class="label">Found</span>{_code(advice.found(result))}</p>{where}
{_found_here(result["message"])}
<p><span class="label">Fix</span>{_code(advice.fix(result, failed))}</p>
<p class="why"><span class="label">Run it</span>{_command(report, result["check"])}</p></section>
"""


def _code(text: str) -> str:
    """Escape text and set what stands in backticks as code."""
    pieces = _(text.replace("``", "`")).split("`")
    for place in range(1, len(pieces), 2):
        pieces[place] = f"<code>{pieces[place]}</code>"
    return "".join(pieces)


def _flags(report: Mapping[str, Any]) -> str:
    if not report["flags"]:
        return ""
    items = [_(flag["message"]) for flag in report["flags"]]
    return f'<h2>Works, but is not claimed</h2><div class="card">{_list(items)}</div>\n'


def _claims(report: Mapping[str, Any]) -> str:
    """What the backend claims, what it does not, and what was therefore not checked."""
    rows = []
    for name, entry in report["stamps"].get("capabilities", {}).items():
        works = "works all the same" if entry["works"] and not entry["claimed"] else ""
        word = "claimed" if entry["claimed"] else f"not claimed{works and ', '}{works}"
        rows.append(f"<tr><td><code>{_(name)}</code></td><td>{word}</td></tr>")
    reasons: dict[str, list[str]] = {}
    for result in report["results"]:
        if result["status"] == "not claimed":
            why = (result["message"].splitlines() or ["it does not say why"])[0][:200]
            reasons.setdefault(why, []).append(result["paragraph"])
    items = [
        f"{_(why)}: {', '.join(_paragraph(p) for p in dict.fromkeys(paragraphs))}"
        for why, paragraphs in reasons.items()
    ]
    unseen = f"<p>Not checked, since it is not claimed:</p>{_list(items)}" if items else ""
    if not rows and not items:
        return ""
    return (
        f'<h2>What it claims</h2><div class="card"><table>{"".join(rows)}</table>{unseen}</div>\n'
    )


def _paragraphs(results: Sequence[Result]) -> str:
    """The specification's paragraphs, as this version has them: what the ids link to."""
    seen = {result["paragraph"] for result in results}
    items = [
        f'<p id="{p.id}"><span class="id">{p.id}</span><b>{_code(p.title)}.</b> '
        f'{_code(p.statement)} <span class="why">{_code(p.reason)}</span></p>'
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
    counts = _count(results)
    seconds = sum(r["seconds"] for r in results)
    opened = " open" if counts["failed"] or counts["error"] else ""
    rows = "".join(_row(report, result) for result in results)
    return f"""<details class="group"{opened}><summary><h3>{title}</h3>{_bar(counts)}\
<span class="count">{counts["passed"]} of {len(results)} · {seconds:.1f} s</span></summary>
<div class="inner"><table>{rows}</table></div></details>
"""


def _row(report: Mapping[str, Any], result: Result) -> str:
    check, state = load_catalogue()[result["check"]], _state(result)
    runs = len(result["cases"])
    note = (
        result["message"].splitlines()[0][:240] if result["message"] and state != "passed" else ""
    )
    why = f'<p class="why">{_(note)}</p>' if note else ""
    times = f" · {runs} runs" if runs > 1 else ""
    # A failure has its place above; the row of any other check is its place.
    bad = Status.parse(result["status"]) >= Status.FAILED
    anchor = "" if bad else f' id="{_(check.name)}"'
    alone = f"<details class=rest><summary>Run it alone</summary>{_command(report, check.name)}"
    return (
        f'<tr{anchor}><td class="state">'
        f'<span class="dot" style="background:{_TONES[state]}"></span>'
        f"{state}</td><td>{_paragraph(check.paragraph)}{_code(check.title)}{why}{alone}</details></td>"
        f'<td class="num">{result["seconds"]:.2f} s{times}</td></tr>\n'
    )


def _unseen(results: Sequence[Result]) -> str:
    """What this run says nothing about."""
    rows = [
        f"<tr><td><span class=id>{r['paragraph']}</span>"
        f"{_code(load_catalogue()[r['check']].title)}</td>"
        f"<td class=state>{r['status']}</td><td>{_(r['message'].splitlines()[0][:200])}</td></tr>\n"
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


def _timings(results: Sequence[Result]) -> str:
    slowest = sorted(results, key=lambda r: -r["seconds"])[:8]
    if not slowest or slowest[0]["seconds"] <= 0:
        return ""
    longest = slowest[0]["seconds"]
    rows = [
        f"<span><code>{_(r['check'].removeprefix('test_'))}</code></span>"
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
        "Command": f"<code>{_(shlex.join(stamps.get('command', [])))}</code>",
        "Specification": _(report["spec"]),
        "Suite": f"{_(report['suite'])} ({_(stamps.get('suite_digest', '?'))})",
        "anydevice": _(stamps.get("anydevice", "?")),
        "Python": _(stamps.get("python", "?")),
        "System": _(stamps.get("platform", "?")),
        "Seed of the examples": _(stamps.get("seed", "?")),
        "Simulated": "yes" if stamps.get("simulated") else "no",
        "Devices": "<br>".join(map(_, devices)) or "none",
    }
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    return f'<h2>Stamps</h2><div class="card"><table>{rows}</table></div>\n'
