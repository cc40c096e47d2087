"""Fixtures for the tests of the suite."""

from __future__ import annotations

import forking
import pytest

from anydevice_conformance import warm_server


@pytest.fixture(scope="session")
def _warm_variables():
    """What says to others that this run of pytest has a warm process."""
    folder = forking.node(forking.RANKS, warm_server.PRELOADED)
    return {"_ANYDEVICE_WARM_PROCESS": f"{folder}/programs"}


@pytest.fixture(scope="module")
def warm_process(_warm_variables):
    """Runs of `certify` in this module fork from one warm process: each starts one else."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in _warm_variables.items():
            patch.setenv(name, value)
        yield
