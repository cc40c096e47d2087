"""Saving and loading: whole files or none, and no code from them."""

import io

import numpy
import pytest
import torch
from safetensors.torch import load_file

from anydevice.errors import OptionError
from anydevice.processes import PartialState
from anydevice.saving import clean_state_dict_for_safetensors, load, save


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    PartialState(cpu=True)


def test_what_is_saved_is_loaded(tmp_path):
    data = {"w": torch.arange(3), "n": [1, "x"], "a": numpy.arange(2.0)}
    save(data, tmp_path / "file.pt")
    found = load(tmp_path / "file.pt")
    assert torch.equal(found["w"], data["w"])
    assert found["n"] == [1, "x"]
    assert found["a"].tolist() == [0.0, 1.0]
    buffer = io.BytesIO()
    save(data["w"], buffer)
    buffer.seek(0)
    assert torch.equal(load(buffer), data["w"])


class Bomb:
    def __reduce__(self):
        return (print, ("run from the file",))


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save(Bomb(), tmp_path / "bomb.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        load(tmp_path / "bomb.pt")
    assert capsys.readouterr().out == ""


def test_a_save_that_fails_leaves_what_was(tmp_path):
    path = tmp_path / "file.pt"
    save(1, path)
    with pytest.raises(Exception, match=r"pickle|local"):
        save(lambda: 1, path)
    assert load(path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]


def test_safetensors_take_tied_weights_and_views(tmp_path):
    weight = torch.arange(6.0).reshape(2, 3)
    state = {"a": weight, "tied": weight, "turned": weight.t(), "part": weight[1]}
    save(state, tmp_path / "m.safetensors", safe_serialization=True)
    found = load_file(tmp_path / "m.safetensors")
    assert sorted(found) == ["a", "part", "turned"]
    assert torch.equal(found["turned"], weight.t())
    assert torch.equal(found["part"], weight[1])
    cleaned = clean_state_dict_for_safetensors({"meta": torch.empty(2, device="meta"), "n": 1})
    assert list(cleaned) == ["meta", "n"]


@pytest.mark.parametrize("obj", [[1], {"a": 1}, {1: torch.ones(1)}])
def test_safetensors_of_something_else_are_refused(tmp_path, obj):
    with pytest.raises(OptionError, match="mapping of names to tensors"):
        save(obj, tmp_path / "m", safe_serialization=True)
    with pytest.raises(OptionError, match="not to an open file"):
        save({}, io.BytesIO(), safe_serialization=True)
    assert list(tmp_path.iterdir()) == []
