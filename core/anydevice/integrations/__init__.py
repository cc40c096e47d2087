"""Other libraries' own ``device_map`` and offloading, carried out by anydevice.

Each submodule is for one library, and has ``enable()`` and ``disable()``. Nothing is imported or
changed before ``enable()`` is called, or asked for in the environment.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Final

from anydevice.errors import OptionError
from anydevice.text import FALSE_WORDS, TRUE_WORDS

__all__ = ["enable_from_environment"]

#: The variable that enables each integration when anydevice is imported.
VARIABLES: Final = {
    "ANYDEVICE_TRANSFORMERS": "transformers",
    "ANYDEVICE_DIFFUSERS": "diffusers",
}


def __getattr__(name: str) -> Any:
    if name in VARIABLES.values():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def enable_from_environment() -> None:
    """Enable the integrations that the environment asks for.

    Raises:
        OptionError: a variable says neither yes nor no.
        MissingDependencyError: the library is not installed, or another version is needed.
    """
    for variable, library in VARIABLES.items():
        text = os.environ.get(variable, "").strip().lower()
        if text in TRUE_WORDS:
            importlib.import_module(f"anydevice.integrations.{library}").enable()
        elif text and text not in FALSE_WORDS:
            raise OptionError(
                f"{variable}={text!r} in the environment is neither yes nor no: use 1 or 0"
            )
