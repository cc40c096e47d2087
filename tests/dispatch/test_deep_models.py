"""Modules nested 900 deep: nothing here needs a recursion as deep as the model."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anydevice
from anydevice.dispatch import attach_layerwise_casting_hooks, get_state_dict_offloaded_model
from anydevice.hooks import (
    attach_align_device_hook,
    attach_execution_device_hook,
    remove_hook_from_submodules,
)
from anydevice.modules import extract_model_from_parallel, named_module_tensors
from anydevice.weights import iter_slots

DEPTH = 900
MAP = {"": 0, ".".join(["inner"] * 450): 1, ".".join(["inner"] * 700): "cpu"}
X = torch.ones(2)


class Deep(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.register_buffer("shift", torch.zeros(2), persistent=False)
        self.inner = inner

    def forward(self, x):
        return x * self.scale + self.shift


def made():
    model = None
    for _ in range(DEPTH):
        model = Deep(model)
    return model


def changed(folder):
    """A forward after a change far inside."""
    model = anydevice.dispatch_model(made(), MAP)
    part = model
    for _ in range(600):
        part = part.inner
    part.more = nn.Linear(2, 2)
    assert torch.equal(part(X).cpu(), X)
    return model


def loaded(folder):
    state = {n: s.get().detach().clone() for n, s in iter_slots(made(), buffers=False)}
    save_file(state, folder / "model.safetensors")
    with anydevice.init_empty_weights():
        model = made()
    return anydevice.load_checkpoint_and_dispatch(model, folder / "model.safetensors", MAP)


def planned(folder):
    plan = anydevice.infer_auto_device_map(made(), {0: "10KiB", "cpu": "1GiB"})
    assert plan.explain()
    assert plan.to_svg()
    return anydevice.dispatch_model(made(), plan)


def cast(folder):
    model = anydevice.dispatch_model(made(), MAP)
    attach_layerwise_casting_hooks(model, torch.float16, torch.float32, ("none",))
    return model.half().float()


def attached(folder):
    model = made()
    attach_execution_device_hook(model, 1)
    remove_hook_from_submodules(model)
    attach_align_device_hook(model, 0, offload=True)
    return model


def told(folder):
    model = anydevice.dispatch_model(made(), MAP)
    assert len(get_state_dict_offloaded_model(model)) == DEPTH
    assert len(list(named_module_tensors(model, recurse=True))) == 2 * DEPTH
    return extract_model_from_parallel(model, recursive=True)


def taking_turns(folder):
    model, handle = anydevice.cpu_offload_with_hook(made(), 0)
    model(X)
    handle.offload()
    return model


@pytest.mark.parametrize(
    "prepare",
    [
        changed,
        loaded,
        planned,
        cast,
        attached,
        told,
        taking_turns,
        lambda folder: anydevice.cpu_offload(made(), 0),
        lambda folder: anydevice.disk_offload(made(), folder / "offload", 0),
    ],
)
def test_deep_models(sim, tmp_path, prepare):
    model = prepare(tmp_path)
    assert torch.equal(model(X).cpu(), X)
    anydevice.undispatch(model)
    assert torch.equal(model(X), X)
