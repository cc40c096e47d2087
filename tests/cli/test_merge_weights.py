"""Sharded checkpoints of each kind become safetensors."""

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

from anydevice import cli

STATE = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "a.bias": torch.arange(3, dtype=torch.bfloat16),
    "b": torch.tensor(5),
}


def merge(*words):
    return cli.main(["merge-weights", *map(str, words)])


def assert_state(folder, *, state=STATE):
    found = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[k], state[k]) and found[k].dtype == state[k].dtype for k in state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # of saving, here
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_folder_of_torch_distributed_checkpoint(tmp_path, capsys, prefix):
    state = {f"{prefix}{name}": tensor for name, tensor in STATE.items()}
    more = {"optimizer.state": torch.ones(2), "step": 3} if prefix else {}
    dcp.save({**state, **more}, checkpoint_id=tmp_path / "in" / "fsdp_0", no_dist=True)
    assert merge(tmp_path / "in", tmp_path / "out") == 0
    assert str(tmp_path / "out" / "model.safetensors") in capsys.readouterr().out
    assert_state(tmp_path / "out")


def test_shards_with_an_index_and_back(tmp_path, tiny_llama, capsys):
    whole = tmp_path / "whole.safetensors"
    assert merge(tiny_llama, whole) == 0
    expected = {k: v for f in tiny_llama.glob("*.safetensors") for k, v in load_file(f).items()}
    found = load_file(whole)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[k], expected[k]) for k in found)
    assert merge(tiny_llama, tmp_path / "out", "--max-shard-size", "80KB") == 0
    out = tmp_path / "out"
    assert all(file.stat().st_size < 90_000 for file in out.glob("*.safetensors"))
    assert_state(out, state=expected)
    assert merge(out, tmp_path / "again") == 0
    assert_state(tmp_path / "again", state=expected)


def test_torch_files_with_tied_weights(tmp_path):
    (tmp_path / "in").mkdir()
    weight = torch.ones(2, 2)
    torch.save({"x": weight, "y": weight}, tmp_path / "in" / "pytorch_model.bin")
    assert merge(tmp_path / "in", tmp_path / "out", "--remove-checkpoint-dir") == 0
    assert_state(tmp_path / "out", state={"x": weight, "y": weight})
    assert not (tmp_path / "in").exists()
    assert merge(tmp_path / "out", tmp_path / "bin", "--unsafe_serialization") == 0
    assert torch.load(tmp_path / "bin" / "pytorch_model.bin").keys() == {"x", "y"}


def test_what_cannot_be_merged_is_named(tmp_path, capsys):
    torch.save({"x": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    for words, message in [
        ([tmp_path / "nowhere", tmp_path / "out"], "nowhere"),
        ([tmp_path, tmp_path / "out", "--max-shard-size", "big"], "'big' is not a size"),
    ]:
        assert merge(*words) == 1
        assert message in capsys.readouterr().err
    assert merge(tmp_path, tmp_path / "out") == 0
    assert merge(tmp_path, tmp_path / "out") == 1
    assert "is there already" in capsys.readouterr().err
    assert merge(tmp_path, tmp_path / "out", "--overwrite") == 0
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / ".metadata").write_bytes(b"nonsense")
    assert merge(tmp_path / "bad", tmp_path / "out2") == 1
    assert ".metadata cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out2").exists()
