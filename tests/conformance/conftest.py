"""Fixtures for the tests of the suite."""

from __future__ import annotations

import os

import pytest

from anydevice_conformance import warm


@pytest.fixture(scope="session")
def _warm_variables():
    """One warm process for this session; what says to others that it is there."""
    before = dict(os.environ)
    with warm.process():
        found = dict(os.environ.items() - before.items())
        for name in found:
            del os.environ[name]
        yield found


@pytest.fixture(scope="module")
def warm_process(_warm_variables):
    """Runs of `certify` in this module fork from one warm process: each starts one else."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _warm_variables.items():
            patch.setenv(name, value)
        yield
