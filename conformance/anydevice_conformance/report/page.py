"""The report as a page: one HTML file with nothing to fetch, for a person to read."""

from __future__ import annotations

import html
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.report import advice
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
        _reasons(report),
        _fixes(report),
        _flags(report),
        _groups(report["results"]),
        _unseen(report["results"]),
        _timings(report["results"]),
        _stamps(report),
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
<span class="word">{_(report["verdict"])}</span></h1>
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
    bad.sort(key=lambda r: (r["known"] is not None, r["paragraph"]))
    return f"<h2>What to fix</h2>\n{''.join(_fix(result) for result in bad)}"


def _fix(result: Result) -> str:
    paragraph, state = load_specification()[result["paragraph"]], _state(result)
    faulty = [c for c in result["cases"] if c["status"] == result["status"]]
    cases = [c["case"] for c in faulty if c["case"]]
    where = f"<p><span class=label>In</span>{_(', '.join(cases[:12]))}</p>" if cases else ""
    known = result["known"]
    excuse = (
        f'<p><span class="label">Known</span>{_(known["reason"])} '
        f'(<a href="{_(known["link"])}">{_(known["link"])}</a>)</p>'
        if known
        else ""
    )
    return f"""<section class="card fix" style="--tone:{_TONES[state]}">
<h3><span class="id">{paragraph.id}</span>{_code(paragraph.title)}</h3>
<p>{_code(paragraph.statement)}</p><p class="why">Why: {_code(paragraph.reason)}</p>
{excuse}<p><span class="label">Found</span>{_code(advice.found(result))}</p>{where}
<pre>{_(result["message"])}</pre>
<p><span class="label">Fix</span>{_code(advice.fix(result))}</p>
<p class="why"><code>{_(result["check"])}</code></p></section>
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


def _groups(results: Sequence[Result]) -> str:
    parts = []
    for prefix, title in GROUPS.items():
        mine = [r for r in results if r["paragraph"].startswith(prefix)]
        if mine:
            parts.append(_group(title, mine))
    return f"<h2>All checks</h2>\n{''.join(parts)}"


def _group(title: str, results: Sequence[Result]) -> str:
    counts = _count(results)
    seconds = sum(r["seconds"] for r in results)
    opened = " open" if counts["failed"] or counts["error"] else ""
    rows = "".join(_row(result) for result in results)
    return f"""<details class="group"{opened}><summary><h3>{title}</h3>{_bar(counts)}\
<span class="count">{counts["passed"]} of {len(results)} · {seconds:.1f} s</span></summary>
<div class="inner"><table>{rows}</table></div></details>
"""


def _row(result: Result) -> str:
    check, state = load_catalogue()[result["check"]], _state(result)
    runs = len(result["cases"])
    note = (
        result["message"].splitlines()[0][:240] if result["message"] and state != "passed" else ""
    )
    why = f'<p class="why">{_(note)}</p>' if note else ""
    times = f" · {runs} runs" if runs > 1 else ""
    return (
        f'<tr><td class="state"><span class="dot" style="background:{_TONES[state]}"></span>'
        f'{state}</td><td><span class="id">{check.paragraph}</span>{_code(check.title)}{why}</td>'
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
    capabilities = [
        f"{name}{' (works)' if entry['works'] and not entry['claimed'] else ''}"
        for name, entry in stamps.get("capabilities", {}).items()
        if entry["claimed"] or entry["works"]
    ]
    devices = [
        f"{d['index']}: {d['name']}" + (f", {d['total'] / 2**30:.1f} GiB" if d["total"] else "")
        for d in stamps.get("devices", [])
    ]
    facts = {
        "Command": f"<code>{_(shlex.join(stamps.get('command', [])))}</code>",
        "Specification": _(report["spec"]),
        "Suite": f"{_(report['suite'])} ({_(stamps.get('suite_digest', '?'))})",
        "anydevice": _(stamps.get("anydevice", "?")),
        "Python": _(stamps.get("python", "?")),
        "System": _(stamps.get("platform", "?")),
        "Capabilities claimed": _(", ".join(capabilities) or "none"),
        "Devices": "<br>".join(map(_, devices)) or "none",
    }
    rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in facts.items())
    return f'<h2>Stamps</h2><div class="card"><table>{rows}</table></div>\n'
