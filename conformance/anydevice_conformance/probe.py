"""A question to a member of the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

__all__ = ["Probe"]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A question to a member.

    Attributes:
        name: the members that it asks.
        run: asks for a device's index, and raises AssertionError for a wrong answer.
        repeat: a plain call, for many times; None where there is none.
        may_decline: whether NotImplementedError is an answer.
        still: whether it takes no memory of a device, so that a full one must answer, too.
    """

    name: str
    run: Callable[[int], object]
    repeat: Callable[[int], object] | None = None
    may_decline: bool = False
    still: bool = False

    def __repr__(self) -> str:
        return self.name
