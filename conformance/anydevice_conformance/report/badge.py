"""A badge for a README."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any, Final

from anydevice_conformance.report.verdict import scope

__all__ = ["badge"]

_COLOURS: Final = {
    "certified": "#1a7f37",
    "passed, not certified": "#7a8a2a",
    "passed on a simulator": "#57789a",
    "passed with known failures": "#9a6700",
    "failed": "#cf222e",
    "error": "#8250df",
    "no hardware": "#6e7781",
}
_WIDTH: Final = 6.6  # pixels of an average letter at 11 px, with some air


def badge(report: Mapping[str, Any]) -> str:
    """An SVG: what was checked on the left, the verdict on the right."""
    left = f"anydevice spec {report['spec']} · {report['stamps'].get('device_type', '?')}"
    right = report["verdict"] + scope(report)
    one, two = (round(len(text) * _WIDTH + 16) for text in (left, right))
    colour = _COLOURS.get(report["verdict"], "#6e7781")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{one + two}" height="20" role="img" \
aria-label="{html.escape(left)}: {html.escape(right)}">
<title>{html.escape(left)}: {html.escape(right)}</title>
<clipPath id="r"><rect width="{one + two}" height="20" rx="4"/></clipPath>
<g clip-path="url(#r)"><rect width="{one}" height="20" fill="#30363d"/>\
<rect x="{one}" width="{two}" height="20" fill="{colour}"/></g>
<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{one / 2}" y="14">{html.escape(left)}</text>
<text x="{one + two / 2}" y="14">{html.escape(right)}</text></g>
</svg>
"""
