"""Marks for checks; `anydevice_conformance.pytest_plugin` makes them known to pytest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from anydevice_conformance.data import short_name

__all__ = ["by_dtype", "needs", "slow", "two_devices"]


def by_dtype(dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """Run the check, which takes ``dtype``, once for each."""
    return pytest.mark.parametrize("dtype", dtypes, ids=short_name)


def needs(capability: str) -> pytest.MarkDecorator:
    """The check is for backends that claim ``capability``; elsewhere it is "not claimed"."""
    return pytest.mark.anydevice_needs(capability)


#: Left out by ``--quick``.
slow: Final = pytest.mark.anydevice_slow
#: Elsewhere it is "no hardware".
two_devices: Final = pytest.mark.anydevice_two_devices
