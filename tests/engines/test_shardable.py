"""A torch that cannot shard on a device is named before work starts."""

from __future__ import annotations

import pytest
import torch

from anydevice.engines.fsdp2 import FSDP2Engine, why_not_shardable
from anydevice.errors import MissingDependencyError


class OldStream:
    """What the host's streams are in torch 2.6."""


class Setup:
    class state:
        device = torch.device("cpu")


def test_the_host_of_an_old_torch(monkeypatch):
    assert why_not_shardable("cpu") == ""
    assert why_not_shardable("privateuseone") == ""
    monkeypatch.setattr(torch.cpu, "Stream", OldStream)
    with pytest.raises(MissingDependencyError, match=r"cannot shard a model on cpu.*newer torch"):
        FSDP2Engine(Setup()).prepare([torch.nn.Linear(1, 1)], [])
