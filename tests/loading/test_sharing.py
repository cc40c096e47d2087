"""Memory that a torch file shares among its tensors is not shared in the model."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import backing_of
from anydevice.loading import load_checkpoint_in_model, load_state_dict
from anydevice.loading.sharing import separate

KINDS = ["zip", "legacy"]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)


@pytest.fixture
def values():
    torch.manual_seed(4)
    return torch.randn(8, 8)


def saved(kind, state, folder):
    torch.save(state, folder / "m.bin", _use_new_zipfile_serialization=kind == "zip")
    return folder / "m.bin"


def two(a, b):
    return {"a.weight": a, "b.weight": b}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device_map", [None, "cpu", "disk", "sim:0"])
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_names_tied_in_the_file_alone(sim, kind, device_map, dtype, values, tmp_path):
    model = Two()
    path = saved(kind, two(values, values), tmp_path)
    load_checkpoint_in_model(model, path, device_map, tmp_path / "offload", dtype)
    with torch.no_grad():
        model.a.weight.add_(1)
    assert torch.equal(model.b.weight.cpu(), values.to(dtype or torch.float32))
    if device_map == "disk":
        assert backing_of(model.a.weight) is not None
        assert backing_of(model.b.weight) is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_tie_of_the_model_stays(kind, values, tmp_path):
    model = Two()
    model.b.weight = model.a.weight
    load_checkpoint_in_model(model, saved(kind, two(values, values), tmp_path))
    assert model.b.weight is model.a.weight
    assert torch.equal(model.a.weight, values)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_one_storage_that_overlap(kind, values, tmp_path):
    whole = torch.cat([values, values + 1])
    path = saved(kind, two(whole[:8], whole[4:12]), tmp_path)
    model = Two()
    load_checkpoint_in_model(model, path)
    with torch.no_grad():
        model.a.weight.zero_()
        model.b.weight.add_(1)
    assert not model.a.weight.any()
    assert torch.equal(model.b.weight, whole[4:12] + 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device_map", [None, "disk", "sim:0"])
def test_one_number_seen_many_times_becomes_many(sim, kind, device_map, values, tmp_path):
    path = saved(kind, two(torch.ones(1).expand(8, 8), values), tmp_path)
    model = Two()
    load_checkpoint_in_model(model, path, device_map, tmp_path / "offload")
    assert model.a.weight.stride() == (8, 1)
    with torch.no_grad():
        model.a.weight[0, 0] = 5
    assert model.a.weight.sum().item() == 63 + 5


@pytest.mark.parametrize("kind", KINDS)
def test_models_of_one_open_checkpoint(kind, values, tmp_path):
    state = {**two(values.clone(), values.t()), "_extra_state": {"steps": [1]}}
    checkpoint = open_checkpoint(saved(kind, state, tmp_path))

    class WithState(Two):
        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    first, second = WithState(), WithState()
    load_checkpoint_in_model(first, checkpoint)
    with torch.no_grad():
        first.a.weight.zero_()
        first.b.weight.zero_()
    first.state["steps"].append(2)
    load_checkpoint_in_model(second, checkpoint)
    assert torch.equal(second.a.weight, values)
    assert torch.equal(second.b.weight, values.t())
    assert second.state == {"steps": [1]}


def test_extra_state_that_shares_a_weight(values, tmp_path):
    class WithState(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))

        def get_extra_state(self):
            return self.state

        def set_extra_state(self, state):
            self.state = state

    model = WithState()
    load_checkpoint_in_model(
        model, saved("zip", {"weight": values, "_extra_state": values}, tmp_path)
    )
    model.state.zero_()
    assert torch.equal(model.weight, values)


def test_what_is_mapped_anew_is_still_counted_as_mapped(values, tmp_path):
    report = load_checkpoint_in_model(Two(), saved("zip", two(values, values), tmp_path))
    assert (report.mapped_bytes, report.read_bytes) == (2 * values.nbytes, 0)


def test_weights_of_safetensors_are_apart_and_not_looked_at(values, tmp_path):
    save_file(two(values, values.clone()), tmp_path / "m.safetensors")
    assert not open_checkpoint(tmp_path / "m.safetensors").may_share


def test_load_state_dict_keeps_what_the_file_shares(values, tmp_path):
    state = load_state_dict(saved("zip", two(values, values), tmp_path))
    state["a.weight"].zero_()
    assert not state["b.weight"].any()  # as torch.load


def test_only_what_shares_is_exchanged():
    base = torch.arange(12.0)
    given = {
        "first": base[:6].view(2, 3),
        "apart": base[6:].view(2, 3).t(),
        "inside": base[2:4],
        "gaps": torch.arange(6.0)[::2],
        "nothing": torch.zeros(0),
        "sparse": torch.eye(2).to_sparse(),
    }
    values = dict(given)
    assert sorted(separate(values)) == ["gaps", "inside"]
    for name, value in values.items():
        assert (value is given[name]) == (name not in ("inside", "gaps"))
        assert torch.equal(value.to_dense(), given[name].to_dense())
