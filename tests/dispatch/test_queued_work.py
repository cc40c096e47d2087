"""Weights that change, come and go while work of the last forward is still queued."""

from __future__ import annotations

import copy

import torch
from torch import nn

from anydevice import cpu_offload, cpu_offload_with_hook
from anydevice.hooks import remove_hook_from_submodules


def blocks(count=3, width=32):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count)])


def test_loading_a_state_dict_waits_for_the_forward_that_reads_the_old_one(sim):
    plain, other = blocks(), blocks()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    model = cpu_offload(copy.deepcopy(plain), execution_device="sim:0")
    x = torch.randn(4, 32)
    on_device = x.to("sim:0")
    with torch.no_grad():
        model(on_device)  # weights are page-locked, the order is learned
        result = model(on_device)  # queued only: streams are lazy
        model.load_state_dict(other.state_dict())
        assert torch.equal(result.cpu(), plain(x))
        assert torch.equal(model(on_device).cpu(), other(x))


def test_nothing_of_it_is_left_when_the_hooks_are_removed(sim):
    model = cpu_offload(blocks(), execution_device="sim:0")
    assert model._load_state_dict_pre_hooks
    remove_hook_from_submodules(model)
    assert not model._load_state_dict_pre_hooks


def test_the_next_model_comes_in_few_copies_that_the_host_does_not_wait_for(sim):
    first, second = blocks(), blocks()
    x = torch.randn(4, 32, device="sim:0")
    plain = copy.deepcopy(second)(copy.deepcopy(first)(x.cpu()))
    first, one = cpu_offload_with_hook(first, "sim:0")
    second, two = cpu_offload_with_hook(second, "sim:0", prev_module_hook=one)
    with torch.no_grad():
        second(first(x))  # now the weights are page-locked
        two.offload()
        sim.reset_counters()
        result = second(first(x))
        counters = sim.counters(0)
    assert counters["host_syncs"] == 0
    assert counters["h2d_copies"] == 2, "one a model: its weights lie in one page-locked block"
    assert counters["d2h_copies"] == 0, "the host's copies never left"
    assert torch.equal(result.cpu(), plain)
