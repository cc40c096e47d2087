"""JSON from strangers: bounded, without repeated keys, and without numbers that are none."""

from __future__ import annotations

import json
from typing import Any, Final, NoReturn

from anydevice.errors import CorruptCheckpointError

__all__ = ["LARGEST_JSON", "parse_json"]

#: Bytes of a header or an index. The largest models' are a few million.
LARGEST_JSON: Final = 100_000_000
#: Keys, of all objects in it: they cost more time and memory than their text alone.
_MOST_KEYS: Final = 2_000_000


def parse_json(raw: bytes, what: str) -> dict[str, Any]:
    """Read a JSON object.

    Args:
        raw: its text, UTF-8.
        what: names it in messages, with the file.

    Raises:
        CorruptCheckpointError: it is no JSON object; it repeats a key; it has NaN or an infinite
            number; or it is too large.
    """
    keys = raw.count(b'":')
    if len(raw) > LARGEST_JSON or keys > _MOST_KEYS:
        raise CorruptCheckpointError(
            f"{what} is too large to be true: {len(raw):,} bytes, {keys:,} keys. "
            f"At most {LARGEST_JSON:,} bytes and {_MOST_KEYS:,} keys are read."
        )
    try:
        found = json.loads(
            raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_number
        )
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
