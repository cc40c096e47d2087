"""Two models over one folder of weights do not see each other's changes."""

from __future__ import annotations

import torch
from torch import nn

from anydevice import disk_offload


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_a_change_in_one_stays_in_it(tmp_path):
    one = disk_offload(model(), tmp_path, execution_device="cpu", offload_buffers=True)
    two = disk_offload(model(), tmp_path, execution_device="cpu", offload_buffers=True)
    with torch.no_grad():
        one[0].weight.zero_()
        one.train()(torch.randn(8, 4))
    assert torch.equal(two[0].weight, model()[0].weight)
    assert torch.equal(two[1].running_mean, torch.zeros(4))
    assert not torch.equal(one[1].running_mean, torch.zeros(4))
    three = disk_offload(model(), tmp_path, execution_device="cpu", offload_buffers=True)
    assert torch.equal(three[0].weight, model()[0].weight)
