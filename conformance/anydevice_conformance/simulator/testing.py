"""A pytest fixture for tests on the simulator.

Import it in a conftest::

from anydevice_conformance.simulator.testing import simulator  # noqa: F401
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import anydevice_conformance.simulator as _simulator

__all__ = ["simulator"]


@pytest.fixture
def simulator() -> Iterator[ModuleType]:
    """The simulator with default options; a test that wants others calls ``configure`` itself.

    Afterwards nothing is left for the next test: garbage is collected, queued work has run, its
    errors are forgotten, and the options are the defaults again. What is alive then is left out of
    later collections: torch alone has half a million objects, which take 0.1 s each time.
    """
    _simulator.configure()
    sim = torch.get_device_module("sim")
    if any(sim.memory_allocated(i) for i in range(sim.device_count())):
        gc.unfreeze()  # a test that failed left a cycle of tensors among what was left out
        gc.collect()
        _simulator.configure()
    yield _simulator
    gc.collect()
    _simulator.configure()
    gc.freeze()
