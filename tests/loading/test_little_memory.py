"""Loads that a device has too little memory for: the model is as it was, all of it."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from anydevice import load_checkpoint_and_dispatch, load_checkpoint_in_model
from anydevice.errors import DoesNotFitError

SIZE = 64  # of a side: a weight takes 16 KiB


def net():
    layers = [nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)]
    return nn.Sequential(*layers, nn.BatchNorm1d(SIZE))


def on_meta():
    return net().to("meta")


def partly_there():
    model = net()
    model[:2].to("sim:0")
    return model


def with_gradients():
    model = partly_there()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    return model


def state(model):
    return {
        (name, kind): (t.device, t.dtype, None if t.is_meta else t.detach().cpu().clone())
        for name, tensor in model.state_dict(keep_vars=True).items()
        for kind, t in (("value", tensor), ("gradient", tensor.grad))
        if t is not None
    }


@pytest.mark.parametrize("make", [on_meta, partly_there, with_gradients])
def test_a_load_that_runs_out_changes_nothing_at_any_capacity(sim, tmp_path, make):
    path = tmp_path / "model.safetensors"
    saved = {n: t for n, t in net().state_dict().items() if "num_batches" not in n}
    save_file(saved, path)
    ends = set()
    for capacity in range(50 << 10, 170 << 10, 22 << 10):
        for load in (load_checkpoint_in_model, load_checkpoint_and_dispatch):
            sim.configure(devices=1, memory=capacity)
            try:
                model = make()
            except torch.OutOfMemoryError:
                continue
            before = state(model)
            try:
                load(model, path, device_map={"": 0})
            except DoesNotFitError:
                after = state(model)
                assert after.keys() == before.keys()
                for name, (device, dtype, value) in before.items():
                    assert after[name][:2] == (device, dtype)
                    assert value is None or torch.equal(after[name][2], value)
                ends.add("refused")
            else:
                loaded = model.state_dict()
                assert {loaded[name].device.type for name in saved} == {"sim"}
                assert all(torch.equal(loaded[name].cpu(), t) for name, t in saved.items())
                ends.add("loaded")
            del model
    assert ends == {"refused", "loaded"}


def test_gradients_that_are_on_meta_are_left_there(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(net().state_dict(), path)
    model = on_meta()
    model(torch.ones(2, SIZE, device="meta")).sum().backward()
    load_checkpoint_in_model(model, path)
    assert all(p.grad is None for p in model.parameters())
