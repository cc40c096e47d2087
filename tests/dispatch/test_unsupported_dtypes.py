"""A dtype that a device does not support is one error, whichever call would put a weight there."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anydevice
from anydevice.errors import DoesNotFitError, ModelError, UnsupportedDtypeError
from anydevice_conformance.simulator.backend import SimulatorBackend


@pytest.fixture
def picky(sim, monkeypatch):
    """Simulated devices without bfloat16."""
    monkeypatch.setattr(
        SimulatorBackend, "supports_dtype", lambda self, dtype: dtype is not torch.bfloat16
    )


def bfloat16_model():
    return nn.Sequential(nn.Linear(4, 4)).to(torch.bfloat16)


def plan(path):
    anydevice.infer_auto_device_map(bfloat16_model(), max_memory={0: "1MiB"})


def dispatch(path):
    anydevice.dispatch_model(bfloat16_model(), {"": "sim:0"})


def load(path):
    anydevice.load_checkpoint_in_model(bfloat16_model(), path, device_map={"": "sim:0"})


def load_and_dispatch(path):
    with anydevice.init_empty_weights():
        model = bfloat16_model()
    anydevice.load_checkpoint_and_dispatch(model, path, device_map={"": "sim:0"})


@pytest.mark.usefixtures("picky")
@pytest.mark.parametrize("call", [plan, dispatch, load, load_and_dispatch])
def test_each_call_raises_the_same_error(call, tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(bfloat16_model().state_dict(), path)
    with pytest.raises(UnsupportedDtypeError, match=r"0.*bfloat16|bfloat16.*sim:0") as caught:
        call(path)
    assert type(caught.value) is UnsupportedDtypeError
    assert isinstance(caught.value, (ModelError, DoesNotFitError))
