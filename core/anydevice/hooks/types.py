"""Types that the code of a hooked call is written with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

__all__ = ["Args", "Forward", "Kwargs"]

#: A module's forward, or what stands for it.
Forward: TypeAlias = Callable[..., Any]
#: Positional arguments of a call.
Args: TypeAlias = tuple[Any, ...]
#: Keyword arguments of a call.
Kwargs: TypeAlias = dict[str, Any]
