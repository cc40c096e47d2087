"""Every test here gets a machine of its own; `mode` runs it once in each mode."""

import gc

import pytest
import torch

from anydevice_conformance.simulator.testing import simulator  # noqa: F401

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def small_heap():
    """Leave torch's own half a million objects out of every collection: 0.1 s each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["sync", "lazy", "thread", "random"])
def mode(request):
    return request.param


@pytest.fixture
def machine(simulator, mode):  # noqa: F811
    """Two devices of 64 MiB, in each mode."""
    simulator.configure(devices=2, memory="64MiB", mode=mode)
    return simulator
