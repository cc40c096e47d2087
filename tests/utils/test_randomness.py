"""Seeds and states, alone and on several processes; and saving from one of them."""

import pytest
import torch
from launching import run_ranks
from safetensors.torch import load_file
from utils import ranks

from anydevice.errors import OptionError
from anydevice.processes import PartialState, RNGType
from anydevice.randomness import set_seed, synchronize_rng_state, synchronize_rng_states

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")


@pytest.mark.parametrize("launch", ["cpu-2", "sim-2"])
def test_processes_agree_where_they_should(launch, tmp_path):
    device, size = launch.split("-")
    found = run_ranks(ranks.numbers, int(size), device, str(tmp_path))
    assert found[0]["same"] == found[1]["same"]
    assert all(a != b for a, b in zip(found[0]["own"], found[1]["own"], strict=True))
    assert found[0]["own"] == found[0]["same"]
    assert found[0]["synchronized"] == found[1]["synchronized"]
    assert [seen["loaded"] for seen in found] == [0, 0]
    assert load_file(tmp_path / "s.safetensors")["w"].item() == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["s.safetensors", "saved.pt"]


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(PartialState, "_shared_state", {})
    return PartialState(cpu=True)


def test_a_seed_is_repeatable_everywhere(alone, sim):
    import random

    import numpy

    def draw():
        numbers = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
        return numbers + [torch.rand(1, device=f"sim:{i}").item() for i in range(2)]

    set_seed(11)
    first = draw()
    set_seed(11)
    assert draw() == first
    set_seed(12)
    assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_deterministic(alone):
    set_seed(1, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "3", True, None])
def test_a_seed_that_is_none_is_named(seed):
    with pytest.raises(OptionError, match="seed="):
        set_seed(seed)


def test_misuse_is_named_before_anything_changes(alone):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with pytest.raises(OptionError, match="give the generator"):
        synchronize_rng_state("generator")
    with pytest.raises(OptionError, match="give the generator"):
        synchronize_rng_state()
    with pytest.raises(OptionError, match="rng_type='dice'"):
        synchronize_rng_states(["torch", "dice"])
    with pytest.raises(OptionError, match="no such device"):
        synchronize_rng_states([RNGType.TORCH, "cuda"])
    assert torch.equal(torch.get_rng_state(), before)
    synchronize_rng_states(["torch"])
    assert torch.equal(torch.get_rng_state(), before)
