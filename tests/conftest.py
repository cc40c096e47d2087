"""Fixtures for all tests."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = ["anydevice_conformance.simulator.testing"]


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Small tensors on few cores: torch's own threads would only get in each other's way."""
    torch.set_num_threads(1)
