"""An accelerator with hardly any memory: what the plan keeps for visitors is what they take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from anydevice import dispatch_model
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
