"""Broken backends, one or more for each paragraph: they test the suite.

Each is a class that stands before the right backend's class in the order of inheritance, so
``super()`` is what is right, and the class holds only the fault. It is put in the registry in the
right one's place.
"""

from __future__ import annotations

from mutants.gallery import (
    MUTANT_VARIABLE,
    Mutant,
    child_environment,
    find,
    gallery,
    install,
    installed,
    mutant,
    patched,
)

__all__ = [
    "MUTANT_VARIABLE",
    "Mutant",
    "child_environment",
    "find",
    "gallery",
    "install",
    "installed",
    "mutant",
    "patched",
]
