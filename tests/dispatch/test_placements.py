"""Dispatching by placements; optimizers made before; models of odd shape."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anydevice import dispatch_model, infer_auto_device_map
from anydevice.errors import ModelError


def stack() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


SIZE = (8 * 8 + 8) * 4


def test_a_plain_copy_that_was_edited_is_a_given_map(sim):
    model = stack()
    edited = dict(infer_auto_device_map(model, {0: 10 * SIZE, "cpu": 10 * SIZE}))
    edited |= {"": "cpu"}
    model = dispatch_model(model, edited)
    assert model.anydevice_placement.bytes_on("cpu") == 4 * SIZE
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_modules_nested_to_any_depth(sim):
    model: nn.Module = nn.Linear(2, 2)
    for _ in range(900):
        model = nn.Sequential(model)
    names = infer_auto_device_map(model, {"cpu": 10**6})
    assert dict(names) == {"": "cpu"}
    dispatch_model(model, {"": 0})
    assert next(model.parameters()).device == torch.device("sim:0")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8)).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach().cpu()


def test_state_of_optimizers_moves_with_the_parameters(sim):
    torch.manual_seed(0)
    plain = stack()
    model = stack()
    model.load_state_dict(plain.state_dict())
    options = {"lr": 0.1, "foreach": False, "capturable": False}
    reference = torch.optim.Adam(plain.parameters(), **options)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    assert torch.equal(trained(model, optimizer), trained(plain, reference))
    dispatch_model(model, {"0": 0, "1": 1, "2": "cpu", "3": 0}, optimizers=optimizer)
    for parameter, state in optimizer.state.items():
        assert state["exp_avg"].device == parameter.device
        assert state["step"].device.type == "cpu"
    torch.testing.assert_close(trained(model, optimizer), trained(plain, reference))
    torch.testing.assert_close(trained(model, optimizer), trained(plain, reference))


def test_an_optimizer_of_another_model_is_refused_before_anything_moves(sim):
    model = stack()
    with pytest.raises(ModelError, match=r"Adam \(optimizers\[0\]\) holds 8 parameters"):
        dispatch_model(model, {"": 0}, optimizers=[torch.optim.Adam(stack().parameters())])
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_every_option_of_placing(sim):
    model = stack()
    dispatch_model(
        model,
        "auto",
        max_memory={0: 3 * SIZE, 1: SIZE, "cpu": 10 * SIZE},
        headroom={0: SIZE},
        disk=False,
        fallback_allocation=True,
        prefetch_depth=0,
    )
    assert model.anydevice_placement.budgets[0] == 2 * SIZE
    assert model.anydevice_placement.bytes_on("disk") == 0


def test_a_model_made_under_inference_mode_can_be_trained(sim):
    with torch.inference_mode():
        model = stack()
        dispatch_model(model, {"0": 0, "1": "cpu", "2": 0, "3": 1})
        model(torch.ones(2, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trained(model, optimizer)
    assert all(p.grad is not None for p in model.parameters())
