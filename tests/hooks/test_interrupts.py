"""An interrupt at any moment of a forward leaves a whole model with the same Parameters."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from tests.interrupting import AtLine
from torch import nn
from torch.overrides import _get_current_function_mode_stack

import anydevice

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MOMENTS = 25


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(self.fc(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.rnn = nn.GRU(8, 8)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.rnn(x)[0]


def prepared(how):
    torch.manual_seed(0)
    model = Net().eval()
    if how == "cpu_offload":
        return anydevice.cpu_offload(model, 0), lambda: None
    if how == "divided":
        device_map = {"layers.0": 0, "layers.1": 1, "layers.2": "cpu", "rnn": "cpu"}
        return anydevice.dispatch_model(model, device_map), lambda: None
    model, handle = anydevice.cpu_offload_with_hook(model, 0)
    return model, handle.offload


@pytest.mark.parametrize("how", ["cpu_offload", "divided", "cpu_offload_with_hook"])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_forward_that_is_interrupted(sim, how, gradients):
    model, end = prepared(how)
    plain = anydevice.undispatch(copy.deepcopy(model))
    parameters = dict(model.named_parameters())

    def forward():
        model(X)
        end()

    with torch.set_grad_enabled(gradients):
        forward()
        lines = AtLine()
        lines.during(forward)
        for moment in random.Random(how).sample(range(1, lines.count), MOMENTS):
            if AtLine(moment).during(forward) is None:  # another order of prefetching ran fewer
                continue
            assert not _get_current_function_mode_stack()
            assert torch.sim.current_device() == 0
            assert all(p is parameters[name] for name, p in model.named_parameters())
            torch.testing.assert_close(model(X).cpu(), plain(X))
            end()
            assert all(p is parameters[name] for name, p in model.named_parameters())
            assert model.rnn.weight_hh_l0.device.type == "cpu"
