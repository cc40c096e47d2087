"""Fixtures of the checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anydevice.backend import DeviceBackend
from anydevice_conformance.outcomes import no_hardware
from anydevice_conformance.session import session_of, subject_of
from anydevice_conformance.subject import Subject


@pytest.fixture
def subject(request: pytest.FixtureRequest) -> Subject:
    """The backend under test, on a machine that has the device."""
    found = _subject(request.config)
    if not found.indices:
        no_hardware(f"no device of type {found.type!r} here: {found.why_none()}")
    return found


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> DeviceBackend:
    """The backend alone, with a device or without."""
    return _subject(request.config).backend


@pytest.fixture
def pair(subject: Subject) -> tuple[int, int]:
    """The indices of two devices."""
    return subject.pair()


@pytest.fixture
def flag(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Say in the report that something works which is not claimed."""
    session = session_of(request.config)

    def write(what: str, message: str) -> None:
        if session is not None:
            session.journal.write("flag", what=what, message=message)

    return write


@pytest.fixture(autouse=True)
def _fixed_seed(request: pytest.FixtureRequest) -> None:
    """As `torch.manual_seed`, which formats a stack for each type of device that is not there."""
    torch.default_generator.manual_seed(0)
    module = _subject(request.config).module
    seed = getattr(module, "manual_seed_all", None) or getattr(module, "manual_seed", None)
    if seed is not None:
        seed(0)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a check that takes ``index`` on the first and the last device."""
    if "index" in metafunc.fixturenames:
        metafunc.parametrize("index", _subject(metafunc.config).ends or [0])


def _subject(config: pytest.Config) -> Subject:
    found = subject_of(config)
    if found is None:
        raise pytest.UsageError("name the backend to check: --anydevice-backend TYPE")
    return found
