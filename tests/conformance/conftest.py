"""Fixtures for the tests of the suite."""

from __future__ import annotations

import pytest

from anydevice_conformance import warm


@pytest.fixture(scope="session")
def warm_process():
    """One warm process for all runs of `certify` in this session, which start one each else."""
    with warm.process():
        yield
