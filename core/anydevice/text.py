"""Names and sizes as a person reads them, for messages and tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["format_bytes", "list_some"]


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
