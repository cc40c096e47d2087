"""The adapter to DeepSpeed, against its public interface."""

from __future__ import annotations

import os
import shutil
import sys
import types

import pytest
import torch
from torch import nn

from anydevice.engines import DeepSpeedPlugin
from anydevice.errors import (
    CheckpointNotFoundError,
    MissingDependencyError,
    ModelError,
    OptionError,
)
from anydevice.training import Accelerator, AcceleratorState, GradientState


@pytest.fixture(autouse=True)
def _fresh():
    for kind in (AcceleratorState, GradientState):
        kind._reset_state()
    yield
    for kind in (AcceleratorState, GradientState):
        kind._reset_state()


class Running(nn.Module):
    """What ``deepspeed.initialize`` returns: calls are kept."""

    def __init__(self, module, optimizer, config, schedule):
        super().__init__()
        self.lr_scheduler = schedule
        self.module, self.optimizer, self.config = module, optimizer, config
        self.calls = []
        if config.get("bf16", {}).get("enabled"):
            module.to(torch.bfloat16)

    def save_checkpoint(self, folder, tag):
        os.makedirs(f"{folder}/{tag}")
        torch.save([self.module.state_dict(), self.optimizer.state_dict()], f"{folder}/{tag}/all")

    def load_checkpoint(self, folder, tag):
        if not os.path.exists(f"{folder}/{tag}"):
            return None, None
        weights, state = torch.load(f"{folder}/{tag}/all")
        self.module.load_state_dict(weights)
        self.optimizer.load_state_dict(state)
        return folder, {}

    def forward(self, *args):
        return self.module(*args)

    def set_gradient_accumulation_boundary(self, boundary):
        self.calls.append(boundary)

    def backward(self, loss, scale_wrt_gas=True):
        self.calls.append("backward")
        (loss / self.config["gradient_accumulation_steps"] if scale_wrt_gas else loss).backward()

    def step(self):
        self.calls.append("step")
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

    def get_global_grad_norm(self):
        return 2.0

    def was_step_applied(self):
        return True

    def zero_optimization_stage(self):
        return self.config["zero_optimization"]["stage"]


@pytest.fixture
def deepspeed(monkeypatch):
    module = types.ModuleType("deepspeed")
    module.__spec__ = types.SimpleNamespace(name="deepspeed")

    def initialize(model, optimizer, model_parameters, lr_scheduler, config):
        if optimizer is None:
            optimizer = torch.optim.SGD(model_parameters, **config["optimizer"]["params"])
        optimizer.clip_grad = config.get("gradient_clipping", 0.0)
        schedule = lr_scheduler(optimizer) if lr_scheduler else None
        running = Running(model, optimizer, config, schedule)
        return running, optimizer, None, schedule

    module.initialize = initialize
    monkeypatch.setitem(sys.modules, "deepspeed", module)
    return module


def test_a_loop_goes_through_deepspeed(deepspeed, tmp_path):
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": "auto"}}
    plugin = DeepSpeedPlugin(hf_ds_config=config, zero_stage=1, gradient_clipping=1.0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", deepspeed_plugin=plugin)
    plain = nn.Linear(2, 1)
    before = plain.weight.detach().clone()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(plain, optimizer)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(4, 2)).sum())
        assert accelerator.clip_grad_norm_(model.parameters(), 1.0) == 2.0
        optimizer.step()
        optimizer.zero_grad()
    assert model.calls == [True, "backward", "step"]
    assert not torch.equal(plain.weight, before)
    assert model.config["bf16"] == {"enabled": True}
    assert model.config["fp16"] == {"enabled": False}
    assert model.config["gradient_clipping"] == model.optimizer.clip_grad == 1.0
    assert model.config["zero_optimization"]["stage"] == 1
    assert not accelerator.optimizer_step_was_skipped
    assert accelerator.distributed_type == "DEEPSPEED"
    assert accelerator.unwrap_model(model) is plain
    assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}
    with pytest.raises(ModelError, match="one model"):
        accelerator.prepare(nn.Linear(1, 1))
    with pytest.raises(OptionError, match=r"save_state\(folder\)"):
        accelerator.engine.state_dict(model, optimizer)
    saved = plain.weight.detach().clone()
    accelerator.save_state(tmp_path / "c")
    names = {path.name for path in (tmp_path / "c").iterdir()}
    assert {"deepspeed", "model.safetensors", "random_states_0.pkl"} <= names
    with torch.no_grad():
        plain.weight.zero_()
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(plain.weight, saved)
    with pytest.raises(OptionError, match="asynchronous"):
        accelerator.save_state(tmp_path / "c", asynchronous=True)
    shutil.rmtree(tmp_path / "c" / "deepspeed")
    with pytest.raises(CheckpointNotFoundError, match=r"another engine.*before prepare"):
        accelerator.load_state(tmp_path / "c")


def test_what_the_configuration_calls_auto_is_filled():
    config = {"optimizer": {"params": {"lr": "auto"}}, "gradient_clipping": 2.0, "fp16": "auto"}
    plugin = DeepSpeedPlugin(config)
    values = {"optimizer.params.lr": 0.1, "gradient_clipping": 1.0, "fp16": {"enabled": True}}
    wrong = []
    plugin.deepspeed_config_process(mismatches=wrong, **values)
    assert plugin.deepspeed_config["optimizer"]["params"]["lr"] == 0.1
    assert plugin.deepspeed_config["fp16"] == {"enabled": True}
    assert wrong == ["gradient_clipping=2.0, and 1.0 in the script"]
    with pytest.raises(OptionError, match=r"gradient_clipping=2\.0, and 1\.0.*'auto'"):
        plugin.deepspeed_config_process(**values)
    plugin.deepspeed_config_process(must_match=False, **values)
    assert plugin.deepspeed_config["gradient_clipping"] == 2.0
    assert not plugin.is_zero3_init_enabled()
    with plugin.zero3_init_context_manager(enable=False):
        pass
    with pytest.raises(OptionError, match="enable=True"):
        plugin.zero3_init_context_manager(enable=True)


def test_what_is_missing_is_told(deepspeed):
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
    with pytest.raises(OptionError, match="train_micro_batch_size_per_gpu"):
        accelerator.prepare(nn.Linear(1, 1))
    for options in (
        {"zero_stage": 4},
        {"zero3_init_flag": True},
        {"offload_param_device": "disk"},
        {"hf_ds_config": "nowhere.json"},
    ):
        with pytest.raises(OptionError, match=next(iter(options))):
            DeepSpeedPlugin(**options)


def test_without_the_package_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingDependencyError, match="pip install deepspeed"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin())
