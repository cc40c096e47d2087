"""Optimizers that nobody named when their model was moved."""

import copy

import pytest
import torch
from torch import nn

import anydevice

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
MAP = {"0": 0, "1": 1, "2": "cpu"}


def made(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    return model, optimizer(model.parameters())


def has_hooks(model):
    return any("_hf_hook" in part.__dict__ for part in model.modules())


def step(model, optimizer):
    optimizer.zero_grad()
    (model(X) ** 2).sum().backward()
    optimizer.step()


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.Adam(p, amsgrad=True),
        lambda p: torch.optim.AdamW(p, foreach=True),
        lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        lambda p: torch.optim.RMSprop(p),
    ],
    ids=["adam", "adamw", "sgd", "rmsprop"],
)
def test_their_state_follows_the_parameters(sim, optimizer):
    plain, of_plain = made(optimizer)
    model, of_model = made(optimizer)
    for move in (
        lambda: None,
        lambda: anydevice.dispatch_model(model, MAP),
        lambda: anydevice.undispatch(model),
        lambda: anydevice.dispatch_model(model, {"": 1}, force_hooks=True),
        lambda: anydevice.cpu_offload(model, 0),
        lambda: anydevice.undispatch(model, 0),
    ):
        move()
        for _ in range(2):
            step(plain, of_plain)
            x = X.to(model[0].weight.device) if not has_hooks(model) else X
            of_model.zero_grad()
            (model(x) ** 2).sum().backward()
            of_model.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.cpu(), plain.get_parameter(name))
            for value in of_model.state[parameter].values():
                assert value.dim() == 0 or value.device == parameter.device


def test_state_of_other_models_stays_where_it_is(sim):
    other, optimizer = made(torch.optim.Adam)
    step(other, optimizer)
    parameter = other[0].weight
    optimizer.state[parameter]["mine"] = torch.ones(2, device="sim:1")
    model, _ = made(torch.optim.Adam)
    anydevice.dispatch_model(copy.deepcopy(model), MAP)
    step(other, optimizer)
    assert str(optimizer.state[parameter]["mine"].device) == "sim:1"
