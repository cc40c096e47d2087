"""What a rank is about to do: in words for messages, and in a few bytes to compare."""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final

__all__ = ["DIGEST", "Said", "calling_line", "digest_of", "show"]

#: Bytes that stand for what a rank is about to do.
DIGEST: Final = 8

#: In words: the number of the call, its name, its line, what it brings, and what else helps.
Said = dict[str, Any]


def digest_of(call: str, description: Any) -> bytes:
    """`DIGEST` bytes that stand for what a rank is about to do."""
    return hashlib.blake2b(repr((call, description)).encode(), digest_size=DIGEST).digest()


def calling_line() -> str:
    """The file and line of the nearest caller outside this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        # contextlib stands between a `with` statement and what it enters.
        if not name.startswith("anydevice.") and name != "contextlib":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def show(doing: Said) -> str:
    """A line for messages."""
    if not doing:
        return "has made no call"
    brings = f" of {doing['brings']}" if doing.get("brings") not in (None, "", []) else ""
    return f"{doing['line']} {doing['call']}{brings} (call {doing['number']})"
