"""What installed packages offer by entry point, read once."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["entry_points", "forget"]

#: How the names end of what describes an installed package.
_DESCRIBED: Final = (".dist-info", "egg-info", ".egg")


def entry_points(group: str, name: str | None = None) -> list[importlib.metadata.EntryPoint]:
    """As `importlib.metadata.entry_points`, which reads the files of all packages each time.

    They are read again where a folder of packages on ``sys.path`` has changed, or is another one.

    Example:
        >>> from anydevice.installed import entry_points
        >>> [point.name for point in entry_points("anydevice.backends", "cpu")]
        ['cpu']
    """
    found: Iterable[importlib.metadata.EntryPoint] = _read(_places()).select(group=group)
    return [point for point in found if name is None or point.name == name]


def forget() -> None:
    """Read the files again at the next call."""
    _read.cache_clear()
    _has_packages.cache_clear()


def _places() -> tuple[tuple[str, int], ...]:
    """The folders on the path in which packages are, and when they last changed."""
    places = []
    for entry in sys.path:
        path = os.path.abspath(entry)
        try:
            place = path, os.stat(path).st_mtime_ns
        except OSError:
            continue
        if _has_packages(*place):
            places.append(place)
    return tuple(places)


@functools.lru_cache(maxsize=64)
def _has_packages(path: str, changed: int) -> bool:
    try:
        names = os.listdir(path)
    except OSError:  # an archive: it may have some
        return True
    return any(name.lower().endswith(_DESCRIBED) for name in names)


@functools.lru_cache(maxsize=1)
def _read(places: tuple[tuple[str, int], ...]) -> Any:
    return importlib.metadata.entry_points()
