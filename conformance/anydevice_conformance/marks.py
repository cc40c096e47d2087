"""Marks for checks; `anydevice_conformance.pytest_plugin` makes them known to pytest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest
import torch

from anydevice_conformance.data import short_name
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.specification import load_specification
from anydevice_conformance.subject import Subject

__all__ = ["by_dtype", "needs", "since", "slow", "two_devices"]


def by_dtype(dtypes: Sequence[torch.dtype]) -> pytest.MarkDecorator:
    """Run the check, which takes ``dtype``, once for each."""
    return pytest.mark.parametrize("dtype", dtypes, ids=short_name)


def needs(capability: str) -> pytest.MarkDecorator:
    """The check is for backends that claim ``capability``; elsewhere it is "not claimed"."""
    return pytest.mark.anydevice_needs(capability)


def since(subject: Subject, paragraph: str) -> None:
    """End the check where the backend was made before its paragraph came to the specification."""
    wanted = load_specification()[paragraph].since
    stated = subject.backend.interface_version
    if stated is None or _numbers(stated) < _numbers(wanted):
        said = "states no interface_version" if stated is None else f"is made for {stated}"
        not_claimed(f"{paragraph} is for backends made for {wanted} or later; this one {said}")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


#: Left out by ``--quick``.
slow: Final = pytest.mark.anydevice_slow
#: Elsewhere it is "no hardware".
two_devices: Final = pytest.mark.anydevice_two_devices
