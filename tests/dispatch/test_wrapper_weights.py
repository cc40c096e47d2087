"""Weights whose class wraps other tensors, as quantized weights of torchao do."""

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import anydevice


class Seen(nn.Linear):
    """Notes where its weight, and what that wraps, is when it runs."""

    def forward(self, x):
        self.seen = {self.weight.device, self.weight.a.device, self.weight.b.device}
        result = super().forward(x)
        return result.a + result.b


def made():
    torch.manual_seed(0)
    model = nn.Sequential(Seen(8, 8, bias=False), nn.Linear(8, 8))
    wrapped = TwoTensor(torch.randn(8, 8), torch.randn(8, 8))
    model[0].weight = nn.Parameter(wrapped, requires_grad=False)
    return model


ATTACH = {
    "cpu_offload": lambda m: anydevice.cpu_offload(m, execution_device=0),
    "with_hook": lambda m: anydevice.cpu_offload_with_hook(m, 0)[0],
    "two_devices": lambda m: anydevice.dispatch_model(m, {"0": "sim:0", "1": "sim:1"}),
    "on_the_host": lambda m: anydevice.dispatch_model(
        m, {"0": "cpu", "1": "sim:0"}, main_device="sim:0"
    ),
}


@pytest.mark.parametrize("how", ATTACH)
def test_what_a_weight_wraps_is_where_the_weight_is(sim, how):
    model = made()
    weight, x = model[0].weight, torch.randn(2, 8)
    wanted = model(x)
    model = ATTACH[how](model)
    for _ in range(2):
        with torch.no_grad():
            assert torch.allclose(model(x).cpu(), wanted, atol=1e-5)
        assert model[0].seen == {torch.device("sim:0")}
    assert model[0].weight is weight
    assert weight.device == weight.a.device == weight.b.device


def test_it_comes_back_when_a_model_is_offloaded(sim):
    model, handle = anydevice.cpu_offload_with_hook(made(), 0)
    values = model[0].weight.a.clone()
    model(torch.randn(2, 8))
    assert model[0].weight.a.device.type == "sim"
    handle.offload()
    assert model[0].weight.device.type == model[0].weight.b.device.type == "cpu"
    assert torch.equal(model[0].weight.a, values)
