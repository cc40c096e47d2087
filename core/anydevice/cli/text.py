"""Tables and sizes as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anydevice.text import format_bytes

__all__ = ["size_text", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows under a header, each column as wide as its widest cell."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in text)


def size_text(size: int | None) -> str:
    """Bytes for a person: ``"1.5 GiB"``; ``"?"`` when not known."""
    return "?" if size is None else format_bytes(size)
