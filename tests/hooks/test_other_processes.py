"""Hooked models that are sent to other processes, or replicated."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.multiprocessing
from torch import nn

import anydevice
from anydevice.errors import ModelError

X = torch.ones(2, 4)
MAPS = [
    {"0": 0, "1": 1},
    {"0": 0, "1": "cpu"},
    {"": 1},
]


def received(model):
    """What a spawned process gets, or the reader of a queue."""
    return pickle.loads(ForkingPickler.dumps(model))


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_a_model_on_devices_is_sent_to_another_process(sim, device_map):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    if len(device_map) > 1:
        model[1].weight = model[0].weight  # a tie
    expected = model(X).detach()
    anydevice.dispatch_model(model, device_map)
    other = received(model)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.device == theirs.device
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(theirs.cpu(), mine.cpu(), rtol=0, atol=0)
    if len(device_map) > 1:
        assert other[0].weight is other[1].weight
    x = X.to("sim:1") if len(device_map) == 1 else X
    torch.testing.assert_close(other(x).cpu(), expected)
    with torch.no_grad():
        other[0].bias.zero_()  # where torch can share no memory, it is a copy
        assert model[0].bias.cpu().count_nonzero() or device_map["0"] == "cpu"


def test_views_of_one_storage_are_so_in_the_other_process(sim):
    anydevice.dispatch_model(nn.Linear(2, 2), 0)
    whole = torch.arange(6.0, device="sim:0")
    whole, half = received((whole, whole[3:]))
    whole.zero_()
    assert half.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "wrap", [lambda m: m, lambda m: nn.Sequential(m), lambda m: m[0]], ids=["it", "around", "part"]
)
@pytest.mark.parametrize("ids", [None, [0], [0, 1]], ids=str)
def test_data_parallel_is_refused_in_one_sentence(sim, ids, wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    anydevice.dispatch_model(model, {"0": 0, "1": "cpu"})
    with pytest.raises(ModelError, match=r"DataParallel cannot replicate.*undispatch\(model"):
        nn.DataParallel(wrap(model), device_ids=ids)


def test_data_parallel_of_a_model_without_hooks_is_torchs_own(sim):
    model = nn.Linear(4, 4)
    anydevice.dispatch_model(model, 0)
    nn.DataParallel(model, device_ids=[0])
