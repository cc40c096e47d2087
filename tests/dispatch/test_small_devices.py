"""An accelerator with hardly any memory: what the plan keeps for visitors is what they take."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from anydevice import dispatch_model, load_checkpoint_and_dispatch, registry
from anydevice.errors import DoesNotFitError
from anydevice.transfer import profile_transfers


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return x + self.norm(self.dense(x))


@pytest.mark.parametrize("width", [100, 540, 700])
@pytest.mark.parametrize("blocks", [2.4, 3.1, 3.7, 5, 7.6])
def test_visitors_take_the_room_that_the_plan_keeps(sim, width, blocks):
    torch.manual_seed(0)
    plain = nn.Sequential(*[Block(width) for _ in range(9)]).eval()
    block = sum(p.nbytes for p in plain[0].parameters())
    activations = 16 * width * 4 + 9 * 4 * 512  # and a device gives its memory in pieces of 512
    sim.configure(devices=1, memory=int(blocks * block) + activations, mode="lazy")
    model = dispatch_model(
        copy.deepcopy(plain), "auto", max_memory={0: int(blocks * block), "cpu": "1GiB"}
    )
    placement = model.anydevice_placement
    assert placement.reserve[0] == placement.ahead * block
    x = torch.randn(1, width)
    with torch.no_grad():
        wanted = plain(x)
        for _ in range(2):  # a device that runs out of memory warns, and a warning is an error here
            assert torch.allclose(model(x).cpu(), wanted, atol=1e-4)
        sim.reset_counters()
        with profile_transfers() as profile:
            model(x)
    assert sim.counters(0)["device_allocs"] == 0
    ahead = [group.ahead for group in profile.groups]
    assert len(ahead) == 9 - placement.bytes_on(0) // block
    assert ahead == [0, *[int(placement.ahead == 2)] * (len(ahead) - 1)]


def test_a_device_that_fills_up_on_the_way_leaves_the_model_as_it_was(sim, monkeypatch, tmp_path):
    """One that does not tell its memory: nothing can be checked before."""
    sim.configure(devices=2, memory=150_000, mode="lazy")
    model = nn.Sequential(*[Block(100) for _ in range(9)])
    model[0].dense.weight.grad = torch.ones(100, 100)
    before = {name: (id(p), p.device.type) for name, p in model.named_parameters()}
    monkeypatch.setattr(
        registry, "measure_memory", lambda *_: (_ for _ in ()).throw(NotImplementedError)
    )
    for device in (0, {"0": "sim:1", "": 0}):
        with pytest.raises(DoesNotFitError, match=r"sim:0 ran out of memory.*model is unchanged"):
            dispatch_model(model, device)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(DoesNotFitError, match="the model is unchanged"):
        load_checkpoint_and_dispatch(model, tmp_path / "model.safetensors", {"": 0})
    monkeypatch.undo()
    assert before == {name: (id(p), p.device.type) for name, p in model.named_parameters()}
    assert model[0].dense.weight.grad.device.type == "cpu"
    assert not hasattr(model, "hf_device_map")
    assert torch.sim.memory_allocated(0) == torch.sim.memory_allocated(1) == 0


def test_the_buffers_that_no_checkpoint_holds_fit_too_or_nothing_is_loaded(sim, tmp_path):
    sim.configure(devices=1, memory=60_000, mode="lazy")
    model = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(1)])
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    model.register_buffer("table", torch.zeros(10_000), persistent=False)
    with pytest.raises(DoesNotFitError, match="sim:0"):
        load_checkpoint_and_dispatch(model, tmp_path / "model.safetensors", {"": 0})
    assert model[0].weight.device == model.table.device == torch.device("cpu")
    assert torch.sim.memory_allocated(0) == 0
