"""Names and sizes as a person reads and writes them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Container, Sequence
from typing import Final

from anydevice.errors import BudgetError

__all__ = ["format_bytes", "lay_out_table", "list_some", "parse_bytes"]

_SIZE: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e\+?(\d+))?\s*(?:([kmgtp])(i?)b?|b)?", re.I)


def parse_bytes(size: int | float | str) -> int:
    """Read a size.

    Args:
        size: bytes, or a number with a unit: ``"10GB"`` is 10 * 10**9, ``"10GiB"`` is 10 * 2**30;
            B, KB, MB, GB, TB, PB and KiB ... PiB, in any case. Units are bytes, never bits.

    Raises:
        BudgetError: it cannot be read, is negative, or is not finite.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size.strip())
        if match is None:
            raise BudgetError(_unreadable(size))
        number, exponent, prefix, binary = match.groups()
        power = " kmgtp".index((prefix or " ").lower())
        scale = (1024 if binary else 1000) ** power * 10 ** int(exponent or 0)
        whole = int(number) * scale if "." not in number else round(float(number) * scale)
        return int(whole)
    if isinstance(size, bool):
        raise BudgetError(_unreadable(size))
    if isinstance(size, float):
        if not math.isfinite(size):
            raise BudgetError(_unreadable(size))
        number_of_bytes = int(size)
    else:
        try:
            number_of_bytes = operator.index(size)
        except TypeError:
            raise BudgetError(_unreadable(size)) from None
    if number_of_bytes < 0:
        raise BudgetError(f"{size!r} is not a size: it is negative")
    return number_of_bytes


def format_bytes(size: int) -> str:
    """Write a size for a person, such as ``"1.5 GiB"``.

    Args:
        size: bytes.
    """
    number = float(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} {unit}" if unit == "B" or number >= 100 else f"{number:.3g} {unit}"


def lay_out_table(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> str:
    """Lay out rows of equal length, each column as wide as its widest cell.

    Args:
        rows: the cells; the first row may be a header.
        numbers: indices of columns that are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def list_some(
    names: Sequence[str], most: int = 5, *, separator: str = ", ", empty: str = "nothing"
) -> str:
    """List the first few names, and say how many more there are.

    Args:
        names: what to list; a model may have thousands.
        most: how many are shown.
        separator: stands between two.
        empty: stands for no names at all.
    """
    shown = separator.join(names[:most]) or empty
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _unreadable(size: object) -> str:
    return f"{size!r} is not a size: use bytes, or a string such as '10GiB', '1.5GB' or '512MB'"
