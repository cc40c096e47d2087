"""Every test here gets a machine of its own; `mode` runs it once in each mode."""

import pytest
import torch

from anydevice_conformance.simulator.testing import simulator  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture(params=["sync", "lazy", "thread", "random"])
def mode(request):
    return request.param


@pytest.fixture
def machine(simulator, mode):  # noqa: F811
    """Two devices of 64 MiB, in each mode."""
    simulator.configure(devices=2, memory="64MiB", mode=mode)
    return simulator
