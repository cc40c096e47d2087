"""Loading in several processes: what the ranks of `ranks.py` do, by real gloo ranks."""

import pytest
import torch
from launching import run_ranks
from loading import ranks
from safetensors.torch import save_file

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("distributed")
    torch.manual_seed(3)
    model = ranks.Net()
    model.norm.running_mean.uniform_()
    state = model.state_dict()
    for world in (2, 4):
        for case in ranks.ORDER:
            save(state, path / f"{case.__name__}-{world}")
    save(state, path)
    return path


def save(state, folder):
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "truth.pt")
    save_file({k: v for k, v in state.items() if k != "head.weight"}, folder / "model.safetensors")


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world, folder):
    run_ranks(ranks.run_all, world, "cpu", str(folder), timeout=250)


def test_a_rank_that_never_calls_is_named(folder):
    run_ranks(ranks.run_last, 2, "cpu", str(folder), "never_calls")


def test_a_rank_that_dies_is_named(folder):
    first, second = run_ranks(ranks.run_last, 2, "cpu", str(folder), "dies", check=False)
    assert first is None, first
    assert second is not None
