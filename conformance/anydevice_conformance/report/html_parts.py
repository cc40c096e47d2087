"""Pieces of HTML that the report's page is made of."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, Final

__all__ = [
    "ORDER",
    "TONES",
    "Result",
    "bar",
    "code",
    "count",
    "escaped",
    "list_of",
    "paragraph_link",
    "state_of",
]

Result = Mapping[str, Any]

TONES: Final = {
    "passed": "var(--passed)",
    "failed": "var(--failed)",
    "error": "var(--error)",
    "known failure": "var(--known)",
    "skipped": "var(--skipped)",
    "not claimed": "var(--claim)",
    "no hardware": "var(--hardware)",
}

ORDER: Final = tuple(TONES)


def escaped(value: object) -> str:
    """Text with the characters that HTML reserves escaped."""
    return html.escape(str(value))


def state_of(result: Result) -> str:
    """The status of a check's result; of a failure on the vendor's list, ``known failure``."""
    known = result.get("known") is not None and result["status"] == "failed"
    return "known failure" if known else str(result["status"])


def count(results: Iterable[Result]) -> Counter[str]:
    """How many results have each state."""
    return Counter(state_of(result) for result in results)


def bar(counts: Counter[str]) -> str:
    """A bar with a piece for each state."""
    pieces = [
        f'<i style="flex:{counts[s]};background:{TONES[s]}" title="{counts[s]} {s}"></i>'
        for s in ORDER
        if counts[s]
    ]
    return f'<div class="bar">{"".join(pieces)}</div>'


def list_of(items: Iterable[str]) -> str:
    """A list of items that are HTML already."""
    return f'<ul class="plain">{"".join(f"<li>{item}</li>" for item in items)}</ul>'


def paragraph_link(identity: str) -> str:
    """A link to a paragraph of the specification."""
    return f'<a class="id" href="#{identity}">{identity}</a>'


def code(text: str) -> str:
    """Escape text and set what stands in backticks as code."""
    pieces = escaped(text.replace("``", "`")).split("`")
    for place in range(1, len(pieces), 2):
        pieces[place] = f"<code>{pieces[place]}</code>"
    return "".join(pieces)
