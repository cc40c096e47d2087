"""How a check ends other than by passing or failing."""

from __future__ import annotations

from typing import NoReturn

import pytest

from anydevice_conformance.statuses import Status

__all__ = ["LeftOut", "NoHardware", "NotClaimed", "left_out", "no_hardware", "not_claimed"]


class _Outcome(pytest.skip.Exception):  # type: ignore[name-defined,misc]
    """A skip that says which status it stands for."""

    status = Status.SKIPPED


class NotClaimed(_Outcome):
    """The backend does not claim it, or says that it cannot answer."""

    status = Status.NOT_CLAIMED


class NoHardware(_Outcome):
    """The machine lacks what the check needs."""

    status = Status.NO_HARDWARE


class LeftOut(_Outcome):
    """The suite itself leaves the check out."""


def not_claimed(reason: str) -> NoReturn:
    """End the check: the backend claims no such thing."""
    raise NotClaimed(reason)


def no_hardware(reason: str) -> NoReturn:
    """End the check: the machine lacks something."""
    raise NoHardware(reason)


def left_out(reason: str) -> NoReturn:
    """End the check: the suite does not run it here."""
    raise LeftOut(reason)
