"""`Accelerator` in one process: what it does, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import pickle
from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from anydevice.data import DataLoaderConfiguration
from anydevice.engines import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    MixedPrecision,
    ParallelismConfig,
)
from anydevice.errors import AnyDeviceError, MissingDependencyError, OptionError
from anydevice.handlers import AutocastKwargs, GradScalerKwargs, KwargsHandler
from anydevice.training import (
    Accelerator,
    GradientAccumulationPlugin,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from anydevice.training.tracking import GeneralTracker


def test_the_quick_tours_five_lines():
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
    x = torch.randn(8, 3)
    data = [(row, row.sum(0, keepdim=True)) for row in x]
    training_dataloader = DataLoader(data, 2)
    loss_function = nn.functional.mse_loss
    raw = copy.deepcopy(model)
    raw_optimizer = torch.optim.SGD(raw.parameters(), lr=0.1)
    raw_scheduler = torch.optim.lr_scheduler.StepLR(raw_optimizer, 1, gamma=0.9)
    for inputs, targets in training_dataloader:
        raw_optimizer.zero_grad()
        loss_function(raw(inputs), targets).backward()
        raw_optimizer.step()
        raw_scheduler.step()

    from anydevice import Accelerator

    accelerator = Accelerator(cpu=True)
    device = accelerator.device
    plain = model
    model, optimizer, training_dataloader, scheduler = accelerator.prepare(
        model, optimizer, training_dataloader, scheduler
    )
    for batch in training_dataloader:
        optimizer.zero_grad()
        inputs, targets = batch
        outputs = model(inputs)
        loss = loss_function(outputs, targets)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
    assert device == torch.device("cpu")
    assert model is plain  # one process, full precision: nothing is put around it
    assert torch.equal(model.weight, raw.weight)
    assert scheduler.get_last_lr() == raw_scheduler.get_last_lr()


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return {"y": self.inner(x)}


def test_the_module_is_not_touched_for_precision():
    plain = Named()
    seen = []
    plain.inner.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    before = set(vars(plain))
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = accelerator.prepare(plain)
    assert model(torch.ones(1, 2))["y"].dtype == torch.float32
    assert seen == [torch.bfloat16]
    assert set(vars(plain)) == before
    assert type(plain) is Named
    assert accelerator.unwrap_model(model) is plain
    assert sorted(model.state_dict()) == sorted(plain.state_dict())
    assert model.inner is plain.inner
    plain.inner._forward_hooks.clear()
    for again in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(again(torch.ones(1, 2))["y"], model(torch.ones(1, 2))["y"])
    assert pickle.loads(pickle.dumps(accelerator.unwrap_model(model))).inner.in_features == 2
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(compiled(torch.ones(1, 2))["y"], model(torch.ones(1, 2))["y"])
    assert accelerator.unwrap_model(compiled) is plain
    with accelerator.autocast():
        assert plain(torch.ones(1, 2))["y"].dtype == torch.bfloat16
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert plain(torch.ones(1, 2))["y"].dtype == torch.float32


def test_states_can_be_copied_and_pickled():
    accelerator = Accelerator(cpu=True)
    for state in (accelerator.state, accelerator.state._partial, accelerator.gradient_state):
        for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert type(again) is type(state)
            assert vars(again) is vars(state)


def test_compiling():
    plugin = TorchDynamoPlugin(backend="eager", fullgraph=True, dynamic=False)
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2)))
    model = accelerator.prepare(plain)
    assert model is not plain
    assert torch.equal(model(torch.ones(1, 2)), plain(torch.ones(1, 2)))
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is plain
    assert accelerator.unwrap_model(model) is model
    regional = TorchDynamoPlugin(backend="eager", use_regional_compilation=True)
    plain = nn.ModuleDict({"a": nn.ModuleList([Named(), Named()])})
    assert regional.compile(plain) is plain
    assert all(block._compiled_call_impl is not None for block in plain["a"])
    with pytest.raises(OptionError, match="no repeated blocks"):
        regional.compile(nn.Linear(1, 1))
    with pytest.raises(OptionError, match="mode='fast'"):
        TorchDynamoPlugin(mode="fast")


def test_accumulation_counts_calls_and_flushes_once():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = nn.Linear(1, 1, bias=False)
    model, loader = accelerator.prepare(model, DataLoader(torch.ones(5, 1), 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=1.0))
    steps = []
    for x in loader:  # two slices a batch: 10 calls, of which the 4th, 8th and last end a step
        for _ in range(2):
            with accelerator.accumulate(model):
                accelerator.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
            steps.append(accelerator.sync_gradients)
    assert [i for i, s in enumerate(steps, 1) if s] == [4, 8, 10]
    other = nn.Linear(1, 1)
    ends = []
    for _ in loader:  # two models by turns: each has its own count
        for which in (model, other):
            with accelerator.accumulate(which):
                ends.append((which is model, accelerator.sync_gradients))
    assert [mine for mine, end in ends if end] == [True, False, True, False]


def test_an_evaluation_inside_the_loop_disturbs_nothing():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    train, evaluate = accelerator.prepare(DataLoader(range(4), 1), DataLoader(range(2), 1))
    model = nn.Linear(1, 1)
    ends = []
    for _ in train:
        for _ in evaluate:
            assert accelerator.gradient_state.active_dataloader is evaluate
        with accelerator.accumulate(model):
            ends.append(accelerator.sync_gradients)
        assert accelerator.gradient_state.active_dataloader is train
    assert ends == [False, False, True, True]
    assert not accelerator.gradient_state.in_dataloader
    plugin = GradientAccumulationPlugin(num_steps=3, sync_with_dataloader=False)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    ends = []
    for _ in accelerator.prepare(DataLoader(range(4), 1)):
        with accelerator.accumulate(model):
            ends.append(accelerator.sync_gradients)
    assert ends == [False, False, True, False]


def test_clipping_unscales_once_and_waits_for_whole_gradients():
    handlers = [GradScalerKwargs(init_scale=1024.0)]
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=handlers
    )
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer = accelerator.prepare(model, optimizer)
    norms = []
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 2)).sum())
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            again = accelerator.clip_grad_norm_(model.parameters(), 0.5)
            accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
    assert norms[0] is None
    assert norms[1].item() == pytest.approx(3**0.5, rel=1e-3)
    assert again.item() == pytest.approx(0.5, rel=1e-3)
    assert max(p.grad.abs().max() for p in model.parameters()) == pytest.approx(0.1)


def test_two_optimizers_share_a_scaler():
    """Both stepped after both backward passes: the scale does not change between the two steps."""
    handlers = [GradScalerKwargs(init_scale=8.0, growth_interval=1)]
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=handlers)
    models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1.0) for m in models]
    before = [m.weight.item() for m in models]
    prepared = accelerator.prepare(*models, *optimizers)
    for model in prepared[:2]:
        accelerator.backward(model(torch.ones(1, 1)).sum())
    for optimizer in prepared[2:]:
        optimizer.step()
    for model, was in zip(models, before, strict=True):
        assert model.weight.item() == pytest.approx(was - 1.0, abs=1e-3)
    assert accelerator.scaler.get_scale() == 16.0


def test_fused_optimizers_and_closures():
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, prepared = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.full((1, 2), float("inf"))).sum())
    prepared.step()
    assert prepared.step_was_skipped
    assert "step" not in vars(optimizer)
    with pytest.raises(OptionError, match="closure"):
        prepared.step(lambda: None)


def test_the_environment_is_read_where_the_script_says_nothing(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    before = dict(os.environ)
    accelerator = Accelerator(cpu=True)
    assert accelerator.mixed_precision == "bf16"
    assert accelerator.gradient_accumulation_steps == 3
    assert accelerator.native_amp
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=5)
    assert accelerator.gradient_accumulation_steps == 5
    with pytest.raises(OptionError, match=r"'no'.*'bf16' already"):
        Accelerator(cpu=True, mixed_precision="no")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mixed_precision": "fp8"}, "torchao"),
        ({"mixed_precision": "half"}, "'half'.*no, fp16, bf16"),
        ({"gradient_accumulation_steps": 0}, "number from 1"),
        ({"scheduler_unit": "epochs"}, "'epochs': give 'batches' or 'steps'"),
        ({"dataloader_config": {"split_batches": True}}, "dict: give a .*DataLoaderConfiguration"),
        ({"project_config": "run"}, "project_config is a str: .*ProjectConfiguration"),
        ({"fsdp_plugin": {}}, "fsdp_plugin is a dict"),
        ({"parallelism_config": "tp"}, "parallelism_config is a str"),
        ({"torch_tp_plugin": 4}, "TorchTensorParallelPlugin"),
        ({"gradient_accumulation_plugin": 4}, "GradientAccumulationPlugin"),
        ({"dynamo_plugin": Fraction(1)}, "fractions.Fraction: .*TorchDynamoPlugin"),
        ({"device_placement": "no"}, "device_placement='no': give True or False"),
        ({"project_dir": 3}, "project_dir=3"),
        ({"rng_types": ["tortch"]}, "rng_types: 'tortch'"),
        ({"log_with": "nothing"}, "no tracker 'nothing'.*jsonl"),
        ({"log_with": "tensorboard"}, "project_dir"),
        ({"kwargs_handlers": [3]}, "int is none of"),
        ({"kwargs_handlers": 3}, "int is none of"),
        ({"kwargs_handlers": GradScalerKwargs()}, "give a list, kwargs_handlers=\\[GradScaler"),
        ({"kwargs_handlers": [KwargsHandler()]}, "torchao"),
        ({"kwargs_handlers": [AutocastKwargs(), AutocastKwargs()]}, "two AutocastKwargs"),
        ({"fsdp_plugin": FullyShardedDataParallelPlugin()}, "started alone"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, "for 2 processes, and there are 1"),
        ({"dynamo_backend": "eager", "dynamo_plugin": TorchDynamoPlugin()}, "give one"),
        ({"engine": "warp"}, "no engine 'warp'.*ddp"),
        ({"deepspeed_plugins": {"a": 1, "b": 2}}, "2 plugins"),
    ],
)
def test_choices_that_cannot_be_are_refused(options, words):
    with pytest.raises(AnyDeviceError, match=words):
        Accelerator(cpu=True, **options)


@pytest.mark.parametrize(
    ("loss", "words"), [(3.0, "float, and no tensor"), (torch.ones(3), r"\(3,\): .*loss.mean\(\)")]
)
def test_a_loss_that_is_no_number_is_refused(loss, words):
    with pytest.raises(OptionError, match=words):
        Accelerator(cpu=True).backward(loss)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (FullyShardedDataParallelPlugin, {"fsdp_version": 1}, "fsdp_version=1"),
        (FullyShardedDataParallelPlugin, {"sharding_strategy": "NO_SHARD"}, "NO_SHARD"),
        (FullyShardedDataParallelPlugin, {"backward_prefetch": "BACKWARD_POST"}, "BACKWARD_PRE"),
        (FullyShardedDataParallelPlugin, {"use_orig_params": False}, "use_orig_params"),
        (FullyShardedDataParallelPlugin, {"limit_all_gathers": False}, "limit_all_gathers"),
        (FullyShardedDataParallelPlugin, {"state_dict_config": 1}, "state_dict_config"),
        (FullyShardedDataParallelPlugin, {"state_dict_type": "LOCAL_STATE_DICT"}, "FULL_STATE"),
        (FullyShardedDataParallelPlugin, {"auto_wrap_policy": "mine"}, "no_wrap"),
        (FullyShardedDataParallelPlugin, {"auto_wrap_policy": "size_based_wrap"}, "min_num"),
        (FullyShardedDataParallelPlugin, {"mixed_precision_policy": "fp8"}, "'fp8'"),
        (
            FullyShardedDataParallelPlugin,
            {"mixed_precision_policy": {"buffer_dtype": "bf16"}},
            "buffer_dtype",
        ),
        (
            FullyShardedDataParallelPlugin,
            {"cpu_ram_efficient_loading": True, "sync_module_states": False},
            "sync_module_states",
        ),
        (FullyShardedDataParallelPlugin, {"activation_checkpointing_offload": True}, "instead|use"),
        (ParallelismConfig, {"cp_size": 2}, "cp_size=2"),
        (ParallelismConfig, {"sp_size": 2}, "DeepSpeed"),
        (ParallelismConfig, {"tp_size": 0}, "tp_size=0"),
        (DistributedDataParallelKwargs, {"comm_wrapper": "fp16"}, "comm_hook"),
        (
            DistributedDataParallelKwargs,
            {"comm_hook": "power_sgd", "comm_wrapper": "power_sgd"},
            "fp16",
        ),
        (DistributedDataParallelKwargs, {"comm_state_option": {"a": 1}}, "power_sgd"),
        (ProjectConfiguration, {"total_limit": 0}, "total_limit=0"),
        (
            ProfileKwargs,
            {"schedule_option": {"active": 1}, "output_trace_dir": "x"},
            "on_trace_ready",
        ),
    ],
)
def test_arguments_that_do_nothing_are_refused_by_name(kind, options, words):
    with pytest.raises(OptionError, match=words):
        kind(**options)


def test_trackers(tmp_path):
    class Own(GeneralTracker):
        name = "own"
        requires_logging_directory = False
        kept = ()

        def log(self, values, step=None, **kwargs):
            self.kept += ((step, dict(values)),)

    own = Own()
    pytest.importorskip("tensorboard")
    pytest.importorskip("PIL")
    accelerator = Accelerator(
        cpu=True, log_with=["jsonl", "tensorboard", own], project_dir=tmp_path
    )
    accelerator.init_trackers("run", config={"lr": 0.1, "deep": {"width": 3}})
    accelerator.log({"loss": torch.tensor(0.5), "both": {"a": 1, "b": 2}}, step=4)
    accelerator.log({"not yet": None}, step=5)
    accelerator.log_images({"image": torch.zeros(1, 4, 4, 3)}, step=4)
    assert accelerator.get_tracker("own") is own
    assert accelerator.get_tracker("jsonl", unwrap=True) == tmp_path / "run" / "log.jsonl"
    with pytest.raises(OptionError, match="no tracker 'wandb'"):
        accelerator.get_tracker("wandb")
    with pytest.raises(OptionError, match="init_kwargs for 'x'"):
        accelerator.init_trackers("run", init_kwargs={"x": {}})
    accelerator.end_training()
    line, empty = (tmp_path / "run" / "log.jsonl").read_text().splitlines()
    assert json.loads(empty)["not yet"] is None
    kept = json.loads(line)
    kept.pop("time")
    assert kept == {"step": 4, "loss": 0.5, "both/a": 1, "both/b": 2}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["deep/width"] == 3
    assert list((tmp_path / "run").glob("events*"))
    assert own.kept[0][0] == 4


def test_a_tracker_whose_package_is_missing_is_refused_with_the_command():
    try:
        import wandb  # noqa: F401
    except ImportError:
        with pytest.raises(MissingDependencyError, match="pip install wandb"):
            Accelerator(cpu=True, log_with="wandb")


def test_profiling(tmp_path):
    handler = ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path), record_shapes=True)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[handler])
    with accelerator.profile() as profiler:
        torch.ones(2) + 1
    assert any("add" in event.key for event in profiler.key_averages())
    assert (tmp_path / "profile_0.json").exists()
    with pytest.raises(OptionError, match="'warp'"):
        ProfileKwargs(activities=["warp"]).build()


def test_prepare_is_told_what_is_prepared_already():
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(range(2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    once = accelerator.prepare(model, optimizer, loader, scheduler, "other")
    assert once[4] == "other"
    assert accelerator.prepare(*once) == once
    assert accelerator.prepare(loader) is not loader
    with pytest.raises(OptionError, match="1 entries for 2"):
        accelerator.prepare(model, optimizer, device_placement=[True])
    assert accelerator.free_memory(*once) == [None] * 5
    assert accelerator._models == []


def test_export_and_save(tmp_path):
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plain[1].weight = plain[0].weight
    model = accelerator.prepare(plain)
    accelerator.save_model(model, tmp_path / "export", max_shard_size="20KB")
    assert (tmp_path / "export" / "model.safetensors").exists()
    from anydevice import load_checkpoint_in_model

    again = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    again[1].weight = again[0].weight
    load_checkpoint_in_model(again, tmp_path / "export", strict=True)
    assert torch.equal(again[0].weight, plain[0].weight)
    accelerator.save({"a": torch.ones(1)}, tmp_path / "a.safetensors", safe_serialization=True)
    accelerator.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    assert torch.equal(torch.load(tmp_path / "a.pt")["a"], torch.ones(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="is a file"):
        accelerator.save_model(model, tmp_path / "file")


@pytest.mark.filterwarnings("ignore:'set_vital'")
def test_a_stateful_loader_goes_on_by_itself(tmp_path):
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    def start():
        config = DataLoaderConfiguration(use_stateful_dataloader=True, data_seed=2)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        return accelerator, accelerator.prepare(DataLoader(range(8), 2, shuffle=True))

    accelerator, loader = start()
    assert isinstance(loader, StatefulDataLoader)
    whole = [b.tolist() for b in loader]
    loader.set_epoch(0)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(2)] == whole[:2]
    accelerator.save_state(tmp_path)
    accelerator, loader = start()
    accelerator.load_state(tmp_path)
    assert [b.tolist() for b in loader] == whole[2:]


def test_mixed_precision_wraps_nothing_that_computes_in_full(tmp_path):
    handlers = [AutocastKwargs(enabled=False)]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    assert not isinstance(accelerator.prepare(nn.Linear(1, 1)), MixedPrecision)
