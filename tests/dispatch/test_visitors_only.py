"""An accelerator that is too small for any block to stay runs them all the same."""

from __future__ import annotations

import copy

import torch
from torch import nn

from anydevice import dispatch_model, infer_auto_device_map


def test_blocks_that_rest_on_the_host_run_on_the_accelerator(sim):
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]).eval()
    block = 64 * 64 * 4 + 64 * 4
    placement = infer_auto_device_map(plain, max_memory={0: block + block // 2, "cpu": "1GiB"})
    assert set(placement.values()) == {"cpu"}
    assert placement.main_device == 0
    model = dispatch_model(copy.deepcopy(plain), placement)
    x = torch.randn(2, 64)
    sim.reset_counters()
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    assert sim.counters(0)["kernels"] > 0
    assert sim.counters(0)["h2d_bytes"] >= 4 * block
