"""Many small weights: a plan counts what the device takes for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from anydevice import dispatch_model, infer_auto_device_map


class Scales(nn.Module):
    """A layer of many scalars, of which an allocator makes 512 bytes each."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(())) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * scale
        return x


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential"])
@pytest.mark.parametrize("given", [None, {0: "1MiB", 1: "1MiB", "cpu": "1GiB"}])
def test_a_plan_never_needs_more_than_the_device_has(sim, device_map, given):
    sim.configure(devices=2, memory=200_000, mode="lazy")
    model = nn.Sequential(*[Scales(50) for _ in range(20)])
    dispatch_model(model, device_map, max_memory=given)
    taken = [torch.sim.memory_allocated(device) for device in (0, 1)]
    assert [100_000 < size <= 200_000 for size in taken] == [True, True], taken
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(torch.ones(2)).cpu(), torch.ones(2))


def test_budgets_for_other_machines_are_taken_at_their_word(sim):
    sim.configure(devices=1, memory=200_000, mode="lazy")
    model = nn.Sequential(*[Scales(50) for _ in range(20)], nn.Linear(500, 500))
    placement = infer_auto_device_map(model, {0: "2MiB", "cpu": "1GiB"})
    assert placement.bytes_on(0) == sum(p.nbytes for p in model.parameters())
