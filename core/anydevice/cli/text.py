"""Sizes and tables as the commands print them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence

from anydevice.text import FALSE_WORDS, format_bytes, lay_out_table

__all__ = ["shows_progress", "size_text", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out rows under a header."""
    return lay_out_table([header, *rows])


def size_text(size: int | None) -> str:
    """Bytes for a person: ``"1.5 GiB"``; ``"?"`` when not known."""
    return "?" if size is None else format_bytes(size)


def shows_progress() -> bool:
    """Whether a progress bar is wanted: on a terminal, unless ``ANYDEVICE_PROGRESS=0``."""
    off = os.environ.get("ANYDEVICE_PROGRESS", "").lower() in FALSE_WORDS
    return sys.stderr.isatty() and not off
