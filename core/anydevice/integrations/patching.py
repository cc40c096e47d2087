"""Attributes of another library that are replaced, and restored later."""

from __future__ import annotations

import importlib
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Final

from anydevice.errors import MissingDependencyError
from anydevice.text import list_some

__all__ = ["Enabled", "Integration", "Patch", "require_function", "require_version"]

_ABSENT: Final = object()
_lock = threading.RLock()


class Patch:
    """One attribute to replace.

    Args:
        owner: a module or class.
        name: the attribute; it may be absent where the library sets it only if it found another
            package.
        value: what takes its place.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner = owner
        self.name = name
        self.value = value
        self._before: Any = None
        self._is_applied = False

    def apply(self) -> None:
        """Replace the attribute."""
        self._before = vars(self.owner).get(self.name, _ABSENT)
        self._is_applied = True
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        """Put back what was there, unless other code has replaced it since."""
        if not self._is_applied or vars(self.owner).get(self.name, _ABSENT) is not self.value:
            return
        if self._before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self._before)


class Integration:
    """The switch of one library's patches.

    It stays on while it has a holder: the user, or another integration that needs it.

    Args:
        find_patches: checks the library and gives its patches; raises where it cannot be used.
        find_needed: gives other integrations that are to be on while this one is.
    """

    def __init__(
        self,
        find_patches: Callable[[], Iterable[Patch]],
        find_needed: Callable[[], Iterable[Integration]] = tuple,
    ) -> None:
        self._find_patches = find_patches
        self._find_needed = find_needed
        self._holders: set[Integration] = set()
        self._needed: list[Integration] = []
        self._applied: list[Patch] = []

    @property
    def is_enabled(self) -> bool:
        """Whether the patches are in place."""
        return bool(self._applied)

    def enable(self, holder: Integration | None = None) -> Enabled:
        """Apply all patches, or none where one cannot be applied.

        Args:
            holder: the integration that needs this one; None for the user.
        """
        with _lock:
            key = holder or self
            was_held = key in self._holders
            if not self._applied:
                try:
                    self._apply()
                except BaseException:
                    self._undo()
                    raise
            self._holders.add(key)
            return Enabled(self, was_held)

    def disable(self, holder: Integration | None = None) -> None:
        """Undo all patches, the last one first, unless another holder needs them."""
        with _lock:
            self._holders.discard(holder or self)
            if not self._holders:
                self._undo()

    def _apply(self) -> None:
        for needed in self._find_needed():
            needed.enable(self)
            self._needed.append(needed)
        for patch in list(self._find_patches()):
            self._applied.append(patch)  # first, so that an interrupt leaves none behind
            patch.apply()

    def _undo(self) -> None:
        while self._applied:
            self._applied.pop().undo()
        while self._needed:
            self._needed.pop().disable(self)


class Enabled:
    """What ``enable()`` returns: a context manager whose end restores the state before."""

    def __init__(self, integration: Integration, was_enabled: bool) -> None:
        self._integration = integration
        self._was_enabled = was_enabled

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *_error: object) -> None:
        if not self._was_enabled:
            self._integration.disable()


def require_version(library: str, oldest: tuple[int, int], below: tuple[int, int]) -> ModuleType:
    """Import a library whose version is in a range.

    Raises:
        MissingDependencyError: it is not installed, or its version is another.
    """
    wanted = f"{library}>={oldest[0]}.{oldest[1]},<{below[0]}.{below[1]}"
    try:
        module = importlib.import_module(library)
    except ImportError as error:
        raise MissingDependencyError(
            f"anydevice.integrations.{library} needs {library}: pip install '{wanted}'"
        ) from error
    text = str(getattr(module, "__version__", "0.0"))
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    version = (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
    if not oldest <= version < below:
        raise MissingDependencyError(
            f"anydevice.integrations.{library} is written for {wanted}, and {text} is installed: "
            f"pip install '{wanted}', or leave the integration disabled"
        )
    return module


def require_function(owner: Any, name: str, parameters: Sequence[str]) -> Any:
    """The function of a library that is to be replaced, if it is as this was written for.

    Raises:
        MissingDependencyError: it is gone, or takes other arguments.
    """
    where = getattr(owner, "__name__", "")
    if inspect.isclass(owner):
        where = f"{owner.__module__}.{owner.__qualname__}"
    function: Any = getattr(owner, name, None)
    found = list(inspect.signature(function).parameters) if callable(function) else None
    if found is None or found[: len(parameters)] != list(parameters):
        library = where.partition(".")[0]
        said = "is gone" if found is None else f"takes {list_some(found)}"
        raise MissingDependencyError(
            f"{where}.{name} {said} in the version of {library} that is installed, and "
            f"anydevice.integrations.{library} replaces it: install a version that it names, or "
            "leave the integration disabled"
        )
    return function
