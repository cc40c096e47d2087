"""Marks for checks; `anydevice_conformance.pytest_plugin` makes them known to pytest."""

from __future__ import annotations

from typing import Final

import pytest

__all__ = ["needs", "slow", "two_devices"]


def needs(capability: str) -> pytest.MarkDecorator:
    """The check is for backends that claim ``capability``; elsewhere it is "not claimed"."""
    return pytest.mark.anydevice_needs(capability)


#: Left out by ``--quick``.
slow: Final = pytest.mark.anydevice_slow
#: Elsewhere it is "no hardware".
two_devices: Final = pytest.mark.anydevice_two_devices
