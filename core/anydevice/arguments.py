"""Classes of many keyword arguments: a misspelled one is named, with the one that was meant."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

from anydevice.errors import UnknownArgumentError
from anydevice.text import list_some, suggest

__all__ = ["names_unknown_arguments", "refuse_unknown_argument"]

T = TypeVar("T")


def names_unknown_arguments(kind: type[T]) -> type[T]:
    """Decorate a class: a keyword that its constructor does not know is an `UnknownArgumentError`.

    Python's own `TypeError` says neither what was meant nor what there is.

    Example:
        >>> @names_unknown_arguments
        ... class Plugin:
        ...     def __init__(self, steps: int = 1): ...
        >>> Plugin(stepz=3)
        Traceback (most recent call last):
        anydevice.errors.UnknownArgumentError: Plugin has no argument 'stepz'; did you mean 'steps'?
    """
    init: Any = kind.__init__
    known = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if not kwargs.keys() <= set(known):
            refuse_unknown_argument(kind.__name__, next(k for k in kwargs if k not in known), known)
        init(self, *args, **kwargs)

    kind.__init__ = checked  # type: ignore[method-assign]
    return kind


def refuse_unknown_argument(owner: str, name: str, known: tuple[str, ...]) -> None:
    """Raise for an argument that a class or function does not take.

    Args:
        owner: the name of the class or function.
        name: of the argument.
        known: names that it takes.

    Raises:
        UnknownArgumentError: always.
    """
    near = suggest(name, known)
    there = f"; it has {list_some(known, 30)}" if not near and known else ""
    raise UnknownArgumentError(f"{owner} has no argument {name!r}{near}{there}")
