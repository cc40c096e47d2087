"""Loading a checkpoint: all of it or nothing, and never nothing in silence."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anydevice import Accelerator
from anydevice.data import DataLoaderConfiguration
from anydevice.errors import (
    AnyDeviceError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
    UnknownArgumentError,
)
from anydevice.state import AcceleratorState, is_initialized


class Counter:
    def __init__(self, limit=10):
        self.value, self.limit = 0, limit

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.value > self.limit:
            raise OverflowError("too much")


class Run:
    """Two models of these widths, an optimizer each, a schedule, a loader and a counter."""

    def __init__(self, widths=(4, 3), limit=10, value=0.0, seed=1):
        self.accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(data_seed=seed)
        )
        self.models = [nn.Linear(2, width) for width in widths]
        for model in self.models:
            for parameter in model.parameters():
                nn.init.constant_(parameter, value)
        self.optimizers = [torch.optim.Adam(model.parameters()) for model in self.models]
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, 0.5 + value / 10)
        self.loader = DataLoader(range(8), 2, shuffle=True)
        self.counter = Counter(limit)
        self.counter.value = int(20 * value)
        prepared = self.accelerator.prepare(
            *self.models, *self.optimizers, self.scheduler, self.loader
        )
        self.loader = prepared[-1]
        self.accelerator.register_for_checkpointing(self.counter)

    def everything(self):
        """A copy of all that a checkpoint holds."""
        return copy.deepcopy(
            [
                *(dict(model.state_dict()) for model in self.models),
                *(optimizer.state_dict() for optimizer in self.optimizers),
                self.scheduler.state_dict(),
                self.loader.state_dict(),
                self.counter.value,
                torch.get_rng_state(),
            ]
        )


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)
    return True


@pytest.fixture(params=["whole", "torch", "parts"])
def saved(request, tmp_path):
    """A checkpoint in each layout."""
    options = {
        "whole": {},
        "torch": {"safe_serialization": False},
        "parts": {"asynchronous": True},
    }
    accelerator = Run(value=1.0, limit=99, seed=7).accelerator
    accelerator.save_state(tmp_path, **options[request.param])
    accelerator.wait_for_save()
    return tmp_path


def cut(path):
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])


#: What is wrong: the run that loads, what is done to the folder first, the error, its words.
FAULTS = {
    "a model's shape": ({"widths": (4, 5)}, None, CheckpointMismatchError, r"model 1 \(Linear\)"),
    "a model too many": ({"widths": (4, 3, 3)}, None, CheckpointNotFoundError, "model 2"),
    "a registered object": ({"limit": 10}, None, OverflowError, "too much"),
    "a file cut": ({"limit": 99}, cut, CorruptCheckpointError, "cannot be read"),
    "random states cut": ({"limit": 99}, "random_states_0.pkl", CorruptCheckpointError, "random"),
    "no scheduler": ({"limit": 99}, "scheduler.bin", CheckpointNotFoundError, "scheduler 0"),
    "no loader's state": ({"limit": 99}, "dataloader.bin", OptionError, "prepared loader"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_leaves_everything_as_it_was(saved, fault):
    options, damage, error, words = FAULTS[fault]
    if callable(damage):
        for name in ("optimizer_1.bin", "distributed_checkpoint/__0_0.distcp"):
            if (saved / name).exists():
                damage(saved / name)
    elif damage == "scheduler.bin":
        (saved / damage).unlink()
    elif damage == "dataloader.bin":
        torch.save({"epoch": 3}, saved / damage)
    elif damage is not None:
        cut(saved / damage)
    run = Run(**options)
    before = run.everything()
    if "too many" in fault and (saved / "distributed_checkpoint").exists():
        error, words = CheckpointMismatchError, "model 2"  # the parts of all are in one folder
    with pytest.raises(error, match=words):
        run.accelerator.load_state(saved)
    assert same(run.everything(), before)


def test_all_comes_back_in_each_layout(saved):
    run, other = Run(limit=99), Run(value=1.0, seed=7)
    run.accelerator.load_state(saved)
    wanted = other.everything()
    assert same(run.everything()[:-1], wanted[:-1])


def test_what_fits_by_the_modules_own_hooks_is_loaded(tmp_path):
    """A module may rename what it loads; only it knows."""

    class Renamed(nn.Module):
        def __init__(self):
            super().__init__()
            self.new = nn.Linear(2, 2)

        def _load_from_state_dict(self, state, prefix, *args):
            for name in ("weight", "bias"):
                if prefix + "old." + name in state:
                    state[prefix + "new." + name] = state.pop(prefix + "old." + name)
            super()._load_from_state_dict(state, prefix, *args)

    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.old = nn.Linear(2, 2)

    accelerator = Accelerator(cpu=True)
    old = accelerator.prepare(Old())
    accelerator.save_state(tmp_path)
    accelerator = Accelerator(cpu=True)
    new = accelerator.prepare(Renamed())
    accelerator.load_state(tmp_path)
    assert torch.equal(new.new.weight, old.old.weight)


def test_hooks_get_the_users_own_modules(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = nn.Linear(2, 2)
    seen = []
    accelerator.prepare(plain)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.extend(models))
    accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(models.pop()))
    accelerator.save_state(tmp_path)
    accelerator.load_state(tmp_path)
    assert [model is plain for model in seen] == [True, True]


def test_loading_into_nothing_is_refused(tmp_path):
    Run().accelerator.save_state(tmp_path)
    with pytest.raises(OptionError, match=r"nothing to load into: call prepare.*register"):
        Accelerator(cpu=True).load_state(tmp_path)
    counted = Accelerator(cpu=True)
    counter = Counter()
    counter.value = 5
    counted.register_for_checkpointing(counter)
    counted.load_state(tmp_path)
    assert counter.value == 0


def test_misspelled_options_are_named(tmp_path):
    accelerator = Run().accelerator
    with pytest.raises(UnknownArgumentError, match="did you mean 'safe_serialization'"):
        accelerator.save_state(tmp_path, safe_serialisation=True)
    with pytest.raises(TypeError, match="did you mean 'strict'"):
        accelerator.load_state(tmp_path, strickt=True)
    assert issubclass(UnknownArgumentError, AnyDeviceError)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_damaged_description_is_named(tmp_path, text):
    accelerator = Run(limit=99).accelerator
    accelerator.save_state(tmp_path)
    assert json.loads((tmp_path / "anydevice.json").read_text())["format"] == 1
    (tmp_path / "anydevice.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"anydevice\.json"):
        accelerator.load_state(tmp_path)


def test_whether_a_state_has_been_made():
    assert not is_initialized()
    Accelerator(cpu=True)
    assert is_initialized()
    AcceleratorState._reset_state()
    assert not is_initialized()
