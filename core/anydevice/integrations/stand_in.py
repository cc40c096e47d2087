"""anydevice's functions under accelerate's import paths, for a moment.

diffusers and PEFT import accelerate inside functions, or at their head. While `standing_in` is open
such an import finds anydevice, which has the same names under the same paths. What was imported
under these names before is put back at its end, also where that was nothing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Final

__all__ = ["INTERFACE", "is_importable", "package", "standing_in"]

#: The version of accelerate whose interface anydevice has.
INTERFACE: Final = "1.15.0"


_NAME: Final = "accelerate"
_PATHS: Final = (
    "big_modeling",
    "hooks",
    "logging",
    "state",
    "utils",
    "utils.constants",
    "utils.dataclasses",
    "utils.imports",
    "utils.memory",
    "utils.modeling",
    "utils.offload",
    "utils.operations",
    "utils.other",
)
_lock = threading.RLock()


def is_importable() -> bool:
    """Whether accelerate itself is installed."""
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec(_NAME) is not None
    return False


class _Package(ModuleType):
    """anydevice, with the version of the interface that it has."""

    __version__ = INTERFACE

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module("anydevice"), name)


@functools.cache
def package() -> ModuleType:
    """What ``import accelerate`` finds while anydevice stands in."""
    return _Package(_NAME)


@contextlib.contextmanager
def standing_in() -> Iterator[None]:
    """Let ``import accelerate`` find anydevice inside a ``with`` block."""
    with _lock:
        before = _taken()
        sys.modules[_NAME] = package()
        for path in _PATHS:
            sys.modules[f"{_NAME}.{path}"] = importlib.import_module(f"anydevice.{path}")
        try:
            yield
        finally:
            _taken()
            sys.modules.update(before)


def _taken() -> dict[str, ModuleType]:
    """Take all modules of that name out of the table of imported ones."""
    names = [name for name in sys.modules if name == _NAME or name.startswith(f"{_NAME}.")]
    return {name: sys.modules.pop(name) for name in names}
