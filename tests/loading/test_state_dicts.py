import pytest
import torch
from safetensors.torch import save_file

from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import CheckpointNotFoundError, UnknownDeviceError
from anydevice.loading import load_state_dict


@pytest.fixture
def state():
    return {"a.w": torch.arange(6.0), "a.b": torch.ones(2, dtype=torch.int8), "c": torch.ones(3)}


@pytest.mark.parametrize("kind", ["safetensors", "torch"])
def test_on_the_host(kind, state, tmp_path):
    path = tmp_path / f"m.{kind}"
    (save_file if kind == "safetensors" else torch.save)(state, path)
    found = load_state_dict(path)
    assert type(found) is dict
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert torch.equal(found[name], tensor)
        assert backing_of(found[name]) is not None


@pytest.mark.parametrize("kind", ["safetensors", "torch", "legacy"])
def test_over_devices(sim, kind, state, tmp_path):
    path = tmp_path / f"m.{kind}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "torch")
    found = load_state_dict(path, {"a": "sim:1", "a.b": "disk"})
    assert {n: str(t.device) for n, t in found.items()} == {
        "a.w": "sim:1",
        "a.b": "cpu",
        "c": "cpu",
    }
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in state.items())
    found = load_state_dict(path, {"": 0})
    assert {str(t.device) for t in found.values()} == {"sim:0"}
    assert list(found) == list(load_state_dict(path))


def test_entries_that_are_no_tensors(state, tmp_path):
    torch.save({**state, "epoch": 3}, tmp_path / "m.bin")
    assert load_state_dict(tmp_path / "m.bin")["epoch"] == 3


def test_errors(sim, state, tmp_path):
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(UnknownDeviceError, match="sim:9"):
        load_state_dict(tmp_path / "m.safetensors", {"": "sim:9"})
    with pytest.raises(CheckpointNotFoundError, match="nothing here"):
        load_state_dict(tmp_path / "nothing here")
