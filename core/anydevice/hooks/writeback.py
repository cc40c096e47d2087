"""What a module writes into a container that was copied for it reaches the caller's own.

Sending a dict, list or dataclass to another device makes a new one. A module that adds to it (a
cache, a list of hidden states) means the one that its caller holds, so the change is made there
too. Tensors that a module changes in place are not sent back: that would stop the host.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

__all__ = ["Copies"]


class Copies:
    """The mutable containers among arguments that were copied to send them to a device.

    Args:
        original: the arguments as they were given.
        sent: the same, as the module gets them.
    """

    def __init__(self, original: Any, sent: Any) -> None:
        self._pairs = [(mine, theirs, _content(theirs)) for mine, theirs in _copied(original, sent)]

    def write_back(self) -> None:
        """Make in the originals the changes that were made in the copies."""
        for mine, theirs, before in self._pairs:
            if isinstance(before, list):
                _write_sequence(mine, theirs, before)
            elif isinstance(theirs, MutableMapping):
                _write_mapping(mine, theirs, before)
            else:
                _write_attributes(mine, theirs, before)


def _copied(original: Any, sent: Any) -> Iterator[tuple[Any, Any]]:
    if original is sent or type(original) is not type(sent):
        return
    if isinstance(original, Mapping):
        if isinstance(original, MutableMapping):
            yield original, sent
        for key, value in original.items():
            yield from _copied(value, sent[key])
    elif isinstance(original, (list, tuple, collections.deque)):
        if not isinstance(original, tuple):
            yield original, sent
        for mine, theirs in zip(original, sent, strict=True):
            yield from _copied(mine, theirs)
    elif dataclasses.is_dataclass(original):
        yield original, sent
        attributes = _attributes(sent)
        for name, value in _attributes(original).items():
            yield from _copied(value, attributes[name])


def _content(container: Any) -> dict[Any, Any] | list[Any]:
    """What is in a container now."""
    if isinstance(container, MutableMapping):
        return dict(container)
    if isinstance(container, (list, collections.deque)):
        return list(container)
    return _attributes(container)


def _attributes(data: Any) -> dict[str, Any]:
    if hasattr(data, "__dict__"):
        return dict(data.__dict__)
    names = [field.name for field in dataclasses.fields(data)]
    return {name: getattr(data, name) for name in names if hasattr(data, name)}


def _write_mapping(mine: Any, theirs: Any, before: dict[Any, Any]) -> None:
    for key, value in theirs.items():
        if key not in before or before[key] is not value:
            mine[key] = value
    for key in before.keys() - theirs.keys():
        mine.pop(key, None)


def _write_attributes(mine: Any, theirs: Any, before: dict[str, Any]) -> None:
    now = _attributes(theirs)
    for name, value in now.items():
        if name not in before or before[name] is not value:
            object.__setattr__(mine, name, value)
    for name in before.keys() - now.keys():
        object.__delattr__(mine, name)


def _write_sequence(mine: Any, theirs: Any, before: list[Any]) -> None:
    same = len(theirs) == len(before) and all(a is b for a, b in zip(theirs, before, strict=True))
    if not same:
        own = {id(sent): item for sent, item in zip(before, mine, strict=False)}
        items = [own.get(id(item), item) for item in theirs]
        mine.clear()
        mine.extend(items)
