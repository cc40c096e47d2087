"""What a module writes into a container that was copied for it reaches the caller's own.

Sending a dict or list to another device makes a new one. A module that adds to it (a cache, a list
of hidden states) means the one that its caller holds, so the change is made there too.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

__all__ = ["Copies"]


class Copies:
    """The mutable containers among arguments that were copied to send them to a device.

    Args:
        original: the arguments as they were given.
        sent: the same, as the module gets them.
    """

    def __init__(self, original: Any, sent: Any) -> None:
        self._pairs = [
            (mine, theirs, dict(theirs) if isinstance(theirs, MutableMapping) else list(theirs))
            for mine, theirs in _copied(original, sent)
        ]

    def write_back(self) -> None:
        """Make in the originals the changes that were made in the copies."""
        for mine, theirs, before in self._pairs:
            if isinstance(before, dict):
                _write_mapping(mine, theirs, before)
            else:
                _write_list(mine, theirs, before)


def _copied(original: Any, sent: Any) -> Iterator[tuple[Any, Any]]:
    if original is sent or type(original) is not type(sent):
        return
    if isinstance(original, MutableMapping):
        yield original, sent
        for key, value in original.items():
            yield from _copied(value, sent[key])
    elif isinstance(original, (list, tuple)):
        if isinstance(original, list):
            yield original, sent
        for mine, theirs in zip(original, sent, strict=True):
            yield from _copied(mine, theirs)


def _write_mapping(mine: Any, theirs: Any, before: dict[Any, Any]) -> None:
    for key, value in theirs.items():
        if key not in before or before[key] is not value:
            mine[key] = value
    for key in before.keys() - theirs.keys():
        mine.pop(key, None)


def _write_list(mine: list[Any], theirs: list[Any], before: list[Any]) -> None:
    same = len(theirs) == len(before) and all(a is b for a, b in zip(theirs, before, strict=True))
    if not same:
        own = {id(sent): item for sent, item in zip(before, mine, strict=False)}
        mine[:] = [own.get(id(item), item) for item in theirs]
