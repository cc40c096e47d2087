"""Plans are made for machines that are described, not for the one that runs the tests."""

from __future__ import annotations

import pytest

from anydevice_conformance.simulator.backend import SimulatorBackend


@pytest.fixture(autouse=True, scope="module")
def _no_accelerator():
    """Other tests may have installed the simulator; here a bare index is nobody's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SimulatorBackend, "is_available", lambda backend: False)
        yield
