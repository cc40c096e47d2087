"""Names and sizes as a person reads and writes them."""

from __future__ import annotations

import decimal
import difflib
import math
import numbers
import operator
import re
from collections.abc import Container, Iterable, Sequence
from typing import Any, Final

from anydevice.errors import BudgetError, OptionError

__all__ = [
    "FALSE_WORDS",
    "SMALLEST_COMPUTED",
    "TRUE_WORDS",
    "as_float",
    "format_bytes",
    "lay_out_table",
    "list_some",
    "parse_bytes",
    "read_bytes",
    "require_text",
    "says_yes",
    "suggest",
    "whole_number",
]

#: Words that mean yes, in lower case: in the environment, configuration files and options.
TRUE_WORDS: Final = frozenset({"1", "true", "t", "yes", "y", "on"})
#: Words that mean no.
FALSE_WORDS: Final = frozenset({"0", "false", "f", "no", "n", "off"})

_SIZE: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:e\+?(\d{1,4}))?\s*(?:([kmgtp])(i?)b?|b)?", re.I)
#: More bytes cannot be counted by torch, nor by most systems.
_LARGEST: Final = 2**63 - 1
#: A number below it that is not whole was not computed, but lacks a unit.
SMALLEST_COMPUTED: Final = 1 << 20
_USE: Final = "use bytes, or a string such as '10GiB', '1.5GB' or '512MB'"


def parse_bytes(size: int | float | str) -> int:
    """Read a size.

    Args:
        size: bytes, or a number with a unit: ``"10GB"`` is 10 * 10**9, ``"10GiB"`` is 10 * 2**30;
            B, KB, MB, GB, TB, PB and KiB ... PiB, in any case. Units are bytes, never bits.

    Raises:
        BudgetError: it cannot be read, is negative, is not finite, or is more than 2**63 - 1; or it
            is a few bytes and a fraction, such as 10.5, where a unit was meant.

    Example:
        >>> from anydevice.utils import convert_file_size_to_int
        >>> convert_file_size_to_int("1KiB"), convert_file_size_to_int("1KB")
        (1024, 1000)
    """
    if isinstance(size, str):
        number_of_bytes = _parse_text(size)
    elif (number := as_float(size)) is not None:
        number_of_bytes = _whole(number, size)
    else:
        number_of_bytes = _integer(size)
    if number_of_bytes < 0:
        raise BudgetError(f"{_cut(size)} is not a size: it is negative; {_USE}")
    if number_of_bytes > _LARGEST:
        raise BudgetError(f"{_cut(size)} is not a size: no device has that much memory; {_USE}")
    return number_of_bytes


def read_bytes(size: Any, where: str) -> int:
    """Read a size; an error begins with the setting that it is of.

    Raises:
        BudgetError: see `parse_bytes`.
    """
    try:
        return parse_bytes(size)
    except BudgetError as error:
        raise BudgetError(f"{where}: {error}") from None


def whole_number(name: str, value: Any, least: int, meaning: str) -> int:
    """Read an argument that counts something.

    Args:
        name: of the argument.
        value: what was given; numpy's integers too, but not True and False.
        least: the smallest that it may be.
        meaning: what it counts, for the message.

    Raises:
        OptionError: it is not a whole number, or too small.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise OptionError(f"{name}={value!r}: {meaning} is needed, a whole number from {least} on")
    return number


def _parse_text(size: str) -> int:
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise BudgetError(_unreadable(size))
    number, exponent, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** " kmgtp".index((prefix or " ").lower())
    value = decimal.Decimal(f"{number}e{exponent or 0}")
    if value > _LARGEST:
        return _LARGEST + 1
    return round(value * unit) if prefix else _whole(value, size)


def _integer(size: Any) -> int:
    if isinstance(size, bool):
        raise BudgetError(_unreadable(size))
    try:
        return operator.index(size)
    except TypeError:
        raise BudgetError(_unreadable(size)) from None


def _whole(size: Any, said: Any) -> int:
    """Bytes of a computed number, such as 0.9 times what is free; a small one must be whole."""
    if not math.isfinite(size):
        raise BudgetError(_unreadable(said))
    if abs(size) < SMALLEST_COMPUTED and size != int(size):
        raise BudgetError(
            f"{_cut(said)} is not a size: there are no fractions of a byte. Give a unit, such as "
            "'10.5GiB'"
        )
    return int(size)


def as_float(value: Any) -> float | None:
    """A float of Python's or numpy's, as Python's; None for all else, integers among it."""
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return float(value)
    return None


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


def suggest(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'x'?"`` where a known name is near ``name``, else ``""``."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _unreadable(size: Any) -> str:
    return f"{_cut(size)} is not a size: {_USE}"


def _cut(said: Any) -> str:
    """Text of any length, for a message."""
    text = hex(said) if isinstance(said, int) and abs(said) > _LARGEST else repr(said)
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"


def says_yes(text: str) -> bool:
    """Whether a variable or an option has a word that means yes, in any case."""
    return text.strip().lower() in TRUE_WORDS


def require_text(**options: object) -> None:
    """Make sure that arguments are strings, or None.

    Raises:
        OptionError: one is not.
    """
    for name, value in options.items():
        if value is not None and not isinstance(value, str):
            raise OptionError(f"{name}={value!r}: a string or None is needed")
