"""Checkpoints: going on equals not having stopped, and a crash leaves the last one whole."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from launching import free_port, run_ranks
from safetensors.torch import load_file
from training import checkpoint_ranks
from training.loops import Net, fresh

from anydevice import Accelerator, ProjectConfiguration
from anydevice.errors import CheckpointMismatchError, CorruptCheckpointError, OptionError

# With the other tests whose ranks train: what these import is imported once, not in each worker.
pytestmark = pytest.mark.xdist_group("training")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Checkpoints of half-way runs, by engine and number of ranks."""
    folder = tmp_path_factory.mktemp("stopped")
    names = []
    for size in (1, 2):
        names = run_ranks(checkpoint_ranks.stop_in_the_middle, size, "cpu", str(folder))[0]
    return folder, names


@pytest.mark.parametrize("size", [1, 2, 4])
def test_going_on_equals_not_having_stopped(stopped, size):
    folder, names = stopped
    assert names == ["ddp-1", "ddp-2", "fsdp2-2", "fsdp2-full-2", "tp-2"]
    assert all(run_ranks(checkpoint_ranks.go_on, size, "cpu", str(folder), names, timeout=120))


def test_keys_on_disk_are_the_plain_models(stopped):
    folder, _ = stopped
    wanted = set(Net().state_dict())
    for name in ("ddp-1", "ddp-2", "fsdp2-full-2"):
        assert set(load_file(folder / name / "model.safetensors")) == wanted, name


def test_everything_comes_back(tmp_path):
    assert all(run_ranks(checkpoint_ranks.everything_comes_back, 2, "cpu", str(tmp_path)))
    assert all(run_ranks(checkpoint_ranks.hooks_take_over, 2, "cpu", str(tmp_path)))


def test_a_save_by_the_main_process_alone(tmp_path, monkeypatch):
    assert all(run_ranks(checkpoint_ranks.saved_by_one, 2, "cpu", str(tmp_path)))
    assert not ProjectConfiguration().save_state_alone
    monkeypatch.setenv("ANYDEVICE_SAVE_STATE_ALONE", "true")  # what the launcher's flag gives
    assert ProjectConfiguration().save_state_alone
    assert not ProjectConfiguration(save_state_alone=False).save_state_alone


@pytest.mark.parametrize(("size", "device"), [(1, "cpu"), (2, "cpu"), (2, "sim")])
def test_a_save_in_the_background(size, device, tmp_path):
    where, cpu = str(tmp_path), device == "cpu"
    assert all(run_ranks(checkpoint_ranks.in_the_background, size, device, where, cpu))


def test_the_end_waits_for_a_save_in_the_background(tmp_path):
    for found in run_ranks(checkpoint_ranks.the_end_waits, 2, "cpu", str(tmp_path / "run")):
        assert found == (["checkpoint_0"], ["checkpoint_1"])


def test_a_kill_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """At each file operation of a second save, and within its files; 50 moments at least."""
    (found,) = run_ranks(checkpoint_ranks.kills, 1, "cpu", str(tmp_path), 60, timeout=250)
    assert sum(died for died, _, _ in found.values()) >= 50
    for way in checkpoint_ranks.WAYS:
        moments = sorted(moment for kind, moment in found if kind == way and moment > 0)
        assert [found[way, moment][0] for moment in moments] == [True] * len(moments[1:]) + [False]
        weights = [found[way, moment][1] for moment in moments]
        assert set(weights) == {1.0, 2.0}
        assert weights == sorted(weights)  # from some moment on it is the new one
    for (way, moment), (died, weight, names) in found.items():
        assert died or weight == 2.0, (way, moment)
        assert moment > 0 or weight == 1.0 or not died, (way, moment)
        assert not [name for name in names if name.startswith(".")], (way, moment, names)
        assert way != "named" or len(names) == 1, (moment, names)


#: Before which moment of a save the kills end, by its way and the rank: 0 writes more than 1.
MOMENTS = {("whole", 0): 23, ("whole", 1): 6, ("parts", 0): 22, ("parts", 1): 9}


def test_a_rank_that_is_killed_while_saving_is_named(tmp_path):
    """The last checkpoint is whole, and the others end with its name, and not by the timeout."""
    cases = [(*which, moment) for which, most in MOMENTS.items() for moment in range(1, most)]
    ports = [free_port() for _ in cases]
    folder = str(tmp_path)
    found = run_ranks(
        checkpoint_ranks.killed_between_ranks, 2, "cpu", folder, cases, ports, timeout=250
    )
    weights = run_ranks(checkpoint_ranks.found_after, 1, "cpu", folder, [way for way, *_ in cases])
    died = 0
    for (way, victim, moment), *told, weight in zip(cases, *found, *weights, strict=True):
        assert weight in ([1.0], [2.0]), (way, victim, moment)
        if told[victim].startswith("signal"):
            died += 1
            assert f"rank {victim}" in told[1 - victim], (way, victim, moment)
        else:
            assert told == ["saved", "saved"], (way, victim, moment)
            assert weight == [2.0]
    assert died >= 50


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft")
def test_adapters_of_a_sharded_model_are_saved_alone(tmp_path):
    assert all(
        run_ranks(checkpoint_ranks.adapters_alone, 2, "cpu", str(tmp_path), imports=["peft"])
    )


def test_a_folder_of_the_peer_loads(tmp_path):
    """Written by accelerate 1.15.0 with AdamW and StepLR, and read back by weights only."""
    accelerate = pytest.importorskip("accelerate")
    from anydevice.training import Accelerator

    def parts():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    theirs = accelerate.Accelerator(cpu=True)
    model, optimizer, scheduler = theirs.prepare(*parts())
    for _ in range(2):
        theirs.backward(model(torch.ones(4, 2)).sum())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    theirs.save_state(str(tmp_path))
    drawn = torch.rand(3)
    fresh()
    ours = Accelerator(cpu=True)
    mine, stepping, schedule = ours.prepare(*parts())
    ours.load_state(tmp_path)
    assert torch.equal(torch.rand(3), drawn)
    for a, b in zip(mine.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert schedule.get_last_lr() == scheduler.get_last_lr()
    assert stepping.state_dict()["state"][0]["step"] == 2
    fresh()


def _prepared(*sizes):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, size) for size in sizes))
    accelerator.prepare(model, torch.optim.Adam([*model.parameters()]))
    return accelerator


def test_one_process_saves_in_the_background_and_hears_no_warning(tmp_path):
    accelerator = _prepared(4)  # warnings are errors here, in the background's thread too
    accelerator.save_state(tmp_path / "checkpoint", asynchronous=True)
    accelerator.wait_for_save()
    accelerator.load_state(tmp_path / "checkpoint")


def test_another_models_checkpoint_is_named(tmp_path):
    _prepared(4).save_state(tmp_path)
    with pytest.raises(
        CheckpointMismatchError, match=r"model\.safetensors.*model 0 \(Sequential\)"
    ):
        _prepared(3).load_state(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"Missing key.*1\.weight"):
        _prepared(4, 2).load_state(tmp_path)
    with pytest.raises(CheckpointMismatchError, match=r"optimizer\.bin' does not fit optimizer 0"):
        _prepared(4, 2).load_state(tmp_path, strict=False)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "random_states_0.pkl"])
@pytest.mark.parametrize("damage", ["cut", "other bytes", "empty"])
def test_a_damaged_file_is_named(tmp_path, name, damage):
    accelerator = _prepared(4)
    accelerator.save_state(tmp_path)
    whole = (tmp_path / name).read_bytes()
    broken = {"cut": whole[: len(whole) // 2], "other bytes": b"junk" * 20, "empty": b""}
    (tmp_path / name).write_bytes(broken[damage])
    with pytest.raises(CorruptCheckpointError, match=name):
        accelerator.load_state(tmp_path)


def test_a_file_is_no_place_for_a_checkpoint(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="is a file"):
        _prepared(4).save_state(tmp_path / "file")
