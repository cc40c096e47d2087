"""float32 results, loss scalers and autocast, as the device's backend has them."""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn

from anydevice.backend import Capabilities
from anydevice.errors import OptionError
from anydevice.handlers import AutocastKwargs
from anydevice.precision import (
    ConvertOutputsToFp32,
    convert_outputs_to_fp32,
    convert_to_fp32,
    get_grad_scaler,
)
from anydevice.processes import PartialState
from anydevice.registry import get_backend
from anydevice.state import AcceleratorState
from anydevice.utils import get_mixed_precision_context_manager

Pair = collections.namedtuple("Pair", ["low", "other"])


@pytest.fixture
def state(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    for name in ("RANK", "WORLD_SIZE", "ACCELERATE_MIXED_PRECISION"):
        monkeypatch.delenv(name, raising=False)
    return PartialState


def forward(x):
    return {"out": x.to(torch.bfloat16), "ids": torch.arange(2)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_becomes_float32_and_nothing_else_changes(dtype):
    ids, double = torch.arange(3), torch.ones(1, dtype=torch.float64)
    data = {"a": [torch.ones(2, dtype=dtype), ids], "b": Pair(torch.zeros(1, dtype=dtype), double)}
    found = convert_to_fp32(data)
    assert found["a"][0].dtype == found["b"].low.dtype == torch.float32
    assert found["a"][1] is ids
    assert found["b"].other is double
    assert data["a"][0].dtype == dtype


def test_a_wrapped_forward_can_be_pickled_and_copied():
    wrapped = convert_outputs_to_fp32(forward)
    for made in (wrapped, pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped)):
        assert isinstance(made, ConvertOutputsToFp32)
        assert made(torch.ones(1))["out"].dtype == torch.float32
    assert wrapped.__name__ == "forward"


def test_a_wrapped_forward_of_a_module_leaves_the_module_alone():
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    wrapped = convert_outputs_to_fp32(model.forward)
    assert wrapped(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert model(torch.ones(1, 2, dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_the_scaler_is_the_devices(state, sim, device):
    made = state(cpu=device == "cpu")
    scaler = get_grad_scaler(init_scale=8.0)
    weight = nn.Parameter(torch.ones(1, device=made.device))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler.scale(weight.sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 1.0
    assert scaler.get_scale() == 4.0


def test_a_device_without_a_scaler_says_so(state, sim, monkeypatch):
    state()
    monkeypatch.setattr(type(get_backend("sim")), "capabilities", Capabilities(streams=True))
    with pytest.raises(OptionError, match="'sim' offers no loss scaler"):
        get_grad_scaler()


@pytest.mark.parametrize("device", ["cpu", "sim"])
@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_context_computes_in_the_states_precision(state, sim, device, name, dtype):
    made = AcceleratorState(mixed_precision=name, cpu=device == "cpu")
    layer = nn.Linear(2, 2).to(made.device)
    x = torch.ones(1, 2, device=made.device)
    with get_mixed_precision_context_manager(native_amp=True):
        assert layer(x).dtype == dtype
        with get_mixed_precision_context_manager(True, AutocastKwargs(enabled=False)):
            assert layer(x).dtype == torch.float32
        with get_mixed_precision_context_manager(native_amp=False):
            assert layer(x).dtype == dtype
    with get_mixed_precision_context_manager():
        assert layer(x).dtype == torch.float32


def test_autocast_dtypes_are_those_that_the_device_supports(sim, monkeypatch):
    backend = get_backend("sim")
    assert backend.autocast_dtypes() == {torch.float16, torch.bfloat16}
    monkeypatch.setattr(
        type(backend), "supports_dtype", lambda self, dtype: dtype != torch.bfloat16
    )
    assert backend.autocast_dtypes() == {torch.float16}
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device_type: False)
    assert backend.autocast_dtypes() == frozenset()
