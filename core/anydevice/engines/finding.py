"""Finding engines by name: those that come with anydevice and those of other packages."""

from __future__ import annotations

from typing import Final

from anydevice.engines.base import Engine
from anydevice.errors import OptionError
from anydevice.installed import entry_points

__all__ = ["ENGINE_GROUP", "find_engine", "list_engines"]

#: The entry-point group in which a package offers its engines.
ENGINE_GROUP: Final = "anydevice.engines"


def list_engines() -> list[str]:
    """Names of all engines that are installed.

    Example:
        >>> from anydevice.engines import list_engines
        >>> {"single", "ddp", "fsdp2", "tp"} <= set(list_engines())
        True
    """
    return sorted({point.name for point in entry_points(ENGINE_GROUP)})


def find_engine(name: str) -> type[Engine]:
    """The engine of that name.

    Raises:
        OptionError: there is none, several packages offer it, or it is no engine.

    Example:
        >>> from anydevice.engines import find_engine
        >>> find_engine("ddp").__name__
        'DDPEngine'
    """
    found = entry_points(ENGINE_GROUP, name)
    if not found:
        raise OptionError(f"no engine {name!r} is installed; there are {', '.join(list_engines())}")
    if len({entry.value for entry in found}) > 1:
        packages = ", ".join(str(entry.dist.name if entry.dist else entry.value) for entry in found)
        raise OptionError(f"several packages offer an engine {name!r}: {packages}. Remove one")
    engine = found[0].load()
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise OptionError(f"the entry point {found[0].value} of {ENGINE_GROUP} is no Engine")
    return engine
