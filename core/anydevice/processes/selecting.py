"""Functions that only some of the processes run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["Function", "only"]

Function = TypeVar("Function", bound=Callable[..., Any])


def only(here: Callable[[], bool], function: Function | None) -> Any:
    """Decorate a function so that it runs where a condition holds, and returns None elsewhere.

    Args:
        here: the condition; asked at each call.
        function: the function; None gives the decorator.
    """
    if function is None:
        return functools.partial(only, here)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if here() else None

    return run
