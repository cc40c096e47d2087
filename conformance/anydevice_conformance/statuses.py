"""What a check can end as. Statuses only move up: of all runs of a check the highest one stands."""

from __future__ import annotations

import enum
from collections.abc import Iterable

__all__ = ["Status", "highest"]


class Status(enum.IntEnum):
    """In order; see the specification for what each means."""

    NOT_CLAIMED = 0
    NO_HARDWARE = 1
    SKIPPED = 2
    PASSED = 3
    FAILED = 4
    ERROR = 5

    @property
    def text(self) -> str:
        """As reports spell it: ``"not claimed"``."""
        return self.name.lower().replace("_", " ")

    @classmethod
    def parse(cls, text: str) -> Status:
        """Read what `text` gave.

        Raises:
            KeyError: no such status.
        """
        return cls[text.upper().replace(" ", "_")]


def highest(statuses: Iterable[Status]) -> Status:
    """The highest of ``statuses``; of none, `Status.SKIPPED`, since nothing was looked at."""
    return max(statuses, default=Status.SKIPPED)
