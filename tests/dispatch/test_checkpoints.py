from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import anydevice
from anydevice.errors import (
    AnyDeviceError,
    BudgetError,
    CheckpointNotFoundError,
    OptionError,
    UnknownDeviceError,
)

X = torch.ones(2, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + self.norm(torch.relu(self.up(x)))


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(4)], nn.Linear(8, 2)).eval()


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file(net().state_dict(), path)
    return path


MAPS = [
    "auto",
    "balanced",
    0,
    "cpu",
    {"": "disk"},
    {"0": 0, "1": "sim:1", "2": "cpu", "3": "disk", "4": "cpu"},
]


@pytest.mark.parametrize("device_map", MAPS, ids=str)
def test_load_and_dispatch(sim, checkpoint, device_map, tmp_path):
    with anydevice.init_empty_weights():
        model = net()
    same = anydevice.load_checkpoint_and_dispatch(
        model, checkpoint, device_map, force_hooks=True, offload_folder=tmp_path / "off"
    )
    assert same is model
    assert torch.equal(model(X), net()(X))
    assert model.hf_device_map == dict(model.anydevice_placement)
    assert not (tmp_path / "off").exists()  # the weights stay in the checkpoint


def test_cast_on_the_way(sim, checkpoint, tmp_path):
    with anydevice.init_empty_weights():
        model = net()
    anydevice.load_checkpoint_and_dispatch(
        model,
        checkpoint,
        {"": 0, "1": "disk", "2": "cpu"},
        dtype="bfloat16",
        offload_folder=tmp_path / "off",
    )
    plain = net().bfloat16()
    assert torch.equal(model(X.bfloat16()), plain(X.bfloat16()))


def test_without_a_map_it_is_only_loaded(checkpoint):
    model = net()
    with torch.no_grad():
        model[0].up.weight.zero_()
    anydevice.load_checkpoint_and_dispatch(model, checkpoint)
    assert torch.equal(model(X), net()(X))
    assert not hasattr(model, "hf_device_map")


@pytest.mark.parametrize(
    ("device_map", "error"),
    [
        ({"": "sim:9"}, UnknownDeviceError),
        ("quickest", UnknownDeviceError),
        ({"7": 0}, AnyDeviceError),
    ],
)
def test_a_bad_map_is_refused_before_loading(sim, checkpoint, device_map, error):
    with anydevice.init_empty_weights():
        model = net()
    with pytest.raises(error):
        anydevice.load_checkpoint_and_dispatch(model, checkpoint, device_map)
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("device_map", ["auto", {"": 0}, None])
@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"prefetch_depth": -1}, OptionError, "prefetch_depth=-1: how many groups"),
        ({"prefetch_depth": 1.5}, OptionError, "prefetch_depth=1.5"),
        ({"prefetch_depth": True}, OptionError, "prefetch_depth=True"),
        ({"prefetch_depth": "2"}, OptionError, "prefetch_depth='2'"),
        ({"prefetch_depth": None}, OptionError, "prefetch_depth=None"),
        ({"max_memory": {0: 10.5}}, BudgetError, r"max_memory\[0\]: 10.5"),
        ({"headroom": 1.5}, BudgetError, "headroom: 1.5"),
        ({"disk": ""}, BudgetError, "disk .*: ''"),
    ],
)
def test_a_wrong_number_is_refused_before_loading(
    sim, checkpoint, device_map, options, error, words
):
    with anydevice.init_empty_weights():
        model = net()
    with pytest.raises(error, match=words):
        anydevice.load_checkpoint_and_dispatch(model, checkpoint, device_map, **options)
    assert all(p.is_meta for p in model.parameters())


def test_numpys_depth_is_a_number(sim, checkpoint):
    model = anydevice.load_checkpoint_and_dispatch(
        net(), checkpoint, {"": "cpu"}, main_device=0, prefetch_depth=np.int64(2)
    )
    assert torch.allclose(model(X), net()(X), atol=1e-5)


def test_no_checkpoint(sim, tmp_path):
    with pytest.raises(CheckpointNotFoundError, match="nothing"):
        anydevice.load_checkpoint_and_dispatch(net(), tmp_path / "nothing.safetensors", "auto")


def test_tight_budgets(sim, checkpoint):
    with anydevice.init_empty_weights():
        model = net()
    anydevice.load_checkpoint_and_dispatch(
        model, checkpoint, "auto", max_memory={0: 1500, "sim:1": 600, "cpu": "1MB"}
    )
    assert len(set(map(str, model.hf_device_map.values()))) > 1
    assert torch.equal(model(X), net()(X))
    anydevice.undispatch(model)
    assert torch.equal(model(X), net()(X))
