"""Loading in several processes: the cases of `ranks.py`, run by real gloo ranks."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

RANKS = Path(__file__).with_name("ranks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    sys.path.insert(0, str(RANKS.parent))
    from ranks import CASES, Net

    path = tmp_path_factory.mktemp("distributed")
    torch.manual_seed(3)
    model = Net()
    model.norm.running_mean.uniform_()
    state = model.state_dict()
    for case in CASES:
        for world in (2, 4):
            here = path / f"{case}-{world}"
            here.mkdir()
            torch.save(state, here / "truth.pt")
            save_file(
                {k: v for k, v in state.items() if k != "head.weight"}, here / "model.safetensors"
            )
    return path


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world, folder):
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(folder), str(rank), str(world)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        results = [rank.communicate(timeout=250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (out, err) in enumerate(results):
        assert out, err[-3000:]
        answer = json.loads(out.splitlines()[-1])
        assert answer["failed"] == {}, "\n".join(f"{k}: {v}" for k, v in answer["failed"].items())
        assert answer["rank"] == number
