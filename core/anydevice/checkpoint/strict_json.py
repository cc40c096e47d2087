"""JSON from untrusted files: bounded, without repeated keys, NaN or infinite numbers."""

from __future__ import annotations

import json
import os
from typing import Any, Final, NoReturn

from anydevice.checkpoint.file_identity import FileIdentity
from anydevice.errors import CorruptCheckpointError

__all__ = ["LARGEST_JSON", "parse_json", "read_bounded"]

#: Bytes of a header, an index or a manifest. The largest models' are a few million.
LARGEST_JSON: Final = 100_000_000
#: How often each of these may be in it: they bound the keys, the containers and the values, which
#: cost more time and memory than their text. Those inside names count too.
_MOST: Final = {b":": 2_000_000, b"{": 2_000_000, b"[": 2_000_000, b",": 5_000_000}


def read_bounded(path: str | os.PathLike[str]) -> bytes:
    """Read a file of JSON, unless it is too large.

    Raises:
        OSError: it is not there, or cannot be read.
        CorruptCheckpointError: it is not a regular file, or has more than `LARGEST_JSON` bytes.
    """
    size = FileIdentity.from_stat(os.stat(path), path).size  # opening a pipe would block
    if size > LARGEST_JSON:
        raise _too_large(os.fspath(path), f"{size:,} bytes, at most {LARGEST_JSON:,} are allowed")
    with open(path, "rb") as file:
        return file.read(size)


def parse_json(raw: bytes, what: str, *, file_names: bool = False) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        raw: its text, UTF-8.
        what: names it in messages, with the file.
        file_names: whether texts may hold bytes that are not UTF-8, as `os.fsdecode` gives them.

    Raises:
        CorruptCheckpointError: it is not a JSON object; it repeats a key; it has NaN, an infinite
            number, -0, or half a surrogate pair; or it is too large.
    """
    if len(raw) > LARGEST_JSON:
        raise _too_large(what, f"{len(raw):,} bytes, at most {LARGEST_JSON:,} are allowed")
    for mark, most in _MOST.items():
        # Most texts have fewer bytes than that.
        if len(raw) > most and (count := raw.count(mark)) > most:
            raise _too_large(
                what, f"{count:,} times {mark.decode()!r}, at most {most:,} are allowed"
            )
    try:
        found = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_number,
            parse_int=_no_minus_zero if b"-0" in raw else None,
        )
        if b"\\u" in raw:  # only an escape can be half a surrogate pair
            text = json.dumps(found, ensure_ascii=False)
            text.encode(errors="surrogateescape" if file_names else "strict")
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else f"{error!s:.200}"
        raise CorruptCheckpointError(f"{what} is not valid JSON: {reason}") from None
    if not isinstance(found, dict):
        raise CorruptCheckpointError(f"{what} is a {type(found).__name__}, not a JSON object")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:200]!r} comes twice")
            seen.add(key)
    return result


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a number")


def _no_minus_zero(text: str) -> int:
    if text == "-0":
        raise ValueError("-0 is not a whole number")
    return int(text)


def _too_large(what: str, how: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{what} is too large: it has {how}")
