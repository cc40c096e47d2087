"""Marks for checks."""

from __future__ import annotations

from typing import Final

import pytest

__all__ = ["LINES", "needs", "slow", "two_devices"]

#: For ``pytest --strict-markers``.
LINES: Final = (
    "anydevice_needs(capability): the check is for backends that claim it",
    "anydevice_slow: left out by --quick",
    "anydevice_two_devices: the check needs two devices of the type",
)


def needs(capability: str) -> pytest.MarkDecorator:
    """The check is for backends that claim ``capability``; elsewhere it is "not claimed"."""
    return pytest.mark.anydevice_needs(capability)


#: Left out by ``--quick``.
slow: Final = pytest.mark.anydevice_slow
#: Elsewhere it is "no hardware".
two_devices: Final = pytest.mark.anydevice_two_devices
