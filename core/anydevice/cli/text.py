"""Sizes and tables as the commands print them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from anydevice.text import format_bytes, lay_out_table

__all__ = ["size_text", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows under a header."""
    return lay_out_table([header, *rows])


def size_text(size: int | None) -> str:
    """Bytes for a person: ``"1.5 GiB"``; ``"?"`` when not known."""
    return "?" if size is None else format_bytes(size)
