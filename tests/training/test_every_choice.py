"""Each field of each class of choices does what it says, or is refused by name: one row a field."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.data import DataLoader

from anydevice import Accelerator
from anydevice.data import DataLoaderConfiguration
from anydevice.engines import (
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    PipelineParallelConfig,
    find_engine,
)
from anydevice.engines.base import Setup
from anydevice.engines.meshes import TorchTensorParallelConfig, TorchTensorParallelPlugin
from anydevice.engines.precise import Autocast
from anydevice.errors import OptionError
from anydevice.handlers import AutocastKwargs, GradScalerKwargs, InitProcessGroupKwargs
from anydevice.processes import PartialState
from anydevice.training import (
    GradientAccumulationPlugin,
    GradientState,
    ProfileKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from anydevice.training.deepspeeding import complete


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Given:
    """What a row finds: the value, and a folder."""

    def __init__(self, kind, field, value, folder):
        self.kind, self.field, self.value, self.folder = kind, field, value, folder

    def make(self, **more):
        return self.kind(**{self.field: self.value}, **more)


def refused(*words, value=True, **more):
    """A row: the field is refused with these words, and its name."""

    def check(given):
        given.value = value
        with pytest.raises(OptionError) as caught:
            given.make(**more)
        text = str(caught.value)
        assert given.field in text, text
        assert all(word in text for word in words), text

    return check


# ---------------------------------------------------------------------- handlers


def autocast(value):
    def check(given):
        given.value = value
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=[given.make()])
        with mock.patch.object(torch, "autocast", wraps=torch.autocast) as called:
            model = accelerator.prepare(nn.Linear(2, 2))
            out = model(torch.ones(1, 2))
            with accelerator.autocast():
                inside = accelerator.unwrap_model(model)(torch.ones(1, 2)).dtype
        if given.field == "enabled":
            assert inside == torch.float32
        else:
            assert {call.kwargs.get(given.field) for call in called.mock_calls} >= {value}
        assert out.dtype == torch.float32

    return check


def scaler(value, read):
    def check(given):
        given.value = value
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[given.make()])
        assert read(accelerator.scaler) == value

    return check


def group(value, also=()):
    def check(given):
        given.value = value(given.folder)
        handler = given.make(**dict(also))
        place = f"file://{given.folder}/place"
        handler.init_method = handler.init_method or place
        init = torch.distributed.init_process_group
        with mock.patch.object(torch.distributed, "init_process_group", wraps=init) as called:
            Accelerator(cpu=True, kwargs_handlers=[handler])
        (call,) = called.mock_calls
        if given.field == "timeout":
            assert call.kwargs["timeout"] == given.value
        elif given.field == "backend":
            assert "gloo" in torch.distributed.get_backend()
        else:
            assert (given.folder / "meeting").exists()

    return check


def profiled(value, **more):
    def check(given):
        given.value = value
        handler = given.make(**more)
        with mock.patch("torch.profiler.profile", wraps=torch.profiler.profile) as called:
            profiler = handler.build()
        ours = called.call_args.kwargs
        if given.field == "activities":
            assert ours["activities"] == [torch.profiler.ProfilerActivity.CPU]
        elif given.field == "schedule_option":
            assert ours["schedule"](0) == torch.profiler.ProfilerAction.WARMUP
        else:
            assert ours[given.field] == value
        assert profiler is not None

    return check


def trace(given):
    given.value = str(given.folder)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[given.make(activities=["cpu"])])
    with accelerator.profile():
        torch.ones(1) + 1
    assert (given.folder / "profile_0.json").exists()


def ddp(value, **more):
    """torch's class is told; it is built for real in the tests of laws."""

    def check(given):
        given.value = value
        handler = given.make(**more)
        state = PartialState(cpu=True)
        setup = Setup(state=state, autocast=Autocast("cpu"), options={type(handler): handler})
        with mock.patch("anydevice.engines.ddp.DistributedDataParallel") as called:
            find_engine("ddp")(setup).prepare([nn.Linear(1, 1)], [])
        if not given.field.startswith("comm_"):
            assert called.call_args.kwargs[given.field] == value
            return
        state_of_hook, hook = called.return_value.register_comm_hook.call_args.args
        assert callable(hook)
        if given.field == "comm_state_option":
            assert state_of_hook.matrix_approximation_rank == 2

    return check


HANDLERS = {
    AutocastKwargs: {"enabled": autocast(False), "cache_enabled": autocast(False)},
    GradScalerKwargs: {
        "init_scale": scaler(8.0, lambda s: s.get_scale()),
        "growth_factor": scaler(3.0, lambda s: s.get_growth_factor()),
        "backoff_factor": scaler(0.25, lambda s: s.get_backoff_factor()),
        "growth_interval": scaler(7, lambda s: s.get_growth_interval()),
        "enabled": scaler(False, lambda s: s.is_enabled()),
    },
    InitProcessGroupKwargs: {
        "backend": group(lambda folder: "gloo"),
        "init_method": group(lambda folder: f"file://{folder}/meeting"),
        "timeout": group(lambda folder: datetime.timedelta(seconds=77)),
    },
    ProfileKwargs: {
        "activities": profiled(["cpu"]),
        "schedule_option": profiled({"wait": 0, "warmup": 1, "active": 1}),
        "on_trace_ready": profiled(print),
        "record_shapes": profiled(True),
        "profile_memory": profiled(True),
        "with_stack": profiled(True),
        "with_flops": profiled(True),
        "with_modules": profiled(True),
        "output_trace_dir": trace,
    },
    DistributedDataParallelKwargs: {
        "dim": ddp(1),
        "broadcast_buffers": ddp(False),
        "bucket_cap_mb": ddp(3),
        "find_unused_parameters": ddp(True),
        "check_reduction": ddp(True),
        "gradient_as_bucket_view": ddp(True),
        "static_graph": ddp(True),
        "comm_hook": ddp("bf16"),
        "comm_wrapper": ddp("fp16", comm_hook="power_sgd"),
        "comm_state_option": ddp({"matrix_approximation_rank": 2}, comm_hook="power_sgd"),
    },
}

# ---------------------------------------------------------------------- sharding


def shard(plugin, model=None, precision=None):
    """What torch's `fully_shard` is told of a model, for each module, with one process."""
    folder = plugin.pop("folder")
    plugin = FullyShardedDataParallelPlugin(**plugin)
    state = PartialState(cpu=True, init_method=f"file://{folder}/meeting")
    setup = Setup(
        state=state,
        autocast=Autocast("cpu", precision),
        options={FullyShardedDataParallelPlugin: plugin},
    )
    model = model or Net()
    import torch.distributed.fsdp as fsdp

    with mock.patch.object(fsdp, "fully_shard", wraps=fsdp.fully_shard) as called:
        find_engine("fsdp2")(setup).prepare([model], [])
    names = {module: name for name, module in model.named_modules()}
    return model, {names[call.args[0]]: call.kwargs for call in called.mock_calls}


def sharded(value, look, **more):
    def check(given):
        model, told = shard({given.field: value, "folder": given.folder, **more})
        assert look(model, told), told
        model(torch.ones(2, 4)).sum().backward()

    return check


def _of(key, wanted):
    return lambda model, told: all(kwargs[key] == wanted for kwargs in told.values())


def _offloaded(model, told):
    return all(isinstance(kwargs["offload_policy"], CPUOffloadPolicy) for kwargs in told.values())


def _units(*names):
    return lambda model, told: set(told) == {"", *names}


def _not_sharded(model, told):
    whole = set(map(id, model.first.parameters()))
    return all(set(map(id, kwargs["ignored_params"])) == whole for kwargs in told.values())


def _hybrid(given):
    plugin = FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD_ZERO2")
    assert plugin.hybrid
    assert plugin.reshard_after_forward is False
    model, told = shard({"sharding_strategy": "SHARD_GRAD_OP", "folder": given.folder})
    assert _of("reshard_after_forward", False)(model, told)


def _values(given):
    with torch.device("meta"):
        model = Net()

    def fill(module):
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.5)

    model, _ = shard({"param_init_fn": fill, "folder": given.folder}, model)
    assert {p.full_tensor().unique().item() for p in model.parameters()} == {0.5}


def _same_start(given):
    with mock.patch("torch.distributed.broadcast") as sent:
        shard({"sync_module_states": False, "folder": given.folder})
        assert not sent.called


def _only_main_has_values(given):
    model = Net()
    before = model.first.weight.detach().clone()
    model, _ = shard({"cpu_ram_efficient_loading": True, "folder": given.folder}, model)
    assert torch.equal(model.first.weight.full_tensor(), before)


def _layout(given):
    for text, whole in (("FULL_STATE_DICT", True), ("SHARDED_STATE_DICT", False)):
        plugin = FullyShardedDataParallelPlugin(state_dict_type=text)
        assert plugin.state_dict_type == text
        fields = {"setup": mock.Mock(options={FullyShardedDataParallelPlugin: plugin})}
        accelerator = Accelerator(cpu=True)
        with mock.patch.object(accelerator, "engine", mock.Mock(**fields)):
            assert accelerator._request({}).whole is whole


def _checkpointed(given):
    from anydevice.engines import fsdp2

    with mock.patch.object(fsdp2, "_checkpoint_activations") as called:
        shard({"activation_checkpointing": True, "folder": given.folder})
    (units,) = called.call_args.args
    assert len(units) == 2
    assert all(isinstance(unit, Block) for unit in units)


def _prefetched(given):
    model, _ = shard({"forward_prefetch": True, "folder": given.folder})
    state = model.blocks[0]._get_fsdp_state()
    assert state._states_to_forward_prefetch == [model.blocks[1]._get_fsdp_state()]


def _by_class(given):
    for names in (["Block"], "Block", " Block, Linear"):
        _, told = shard({"transformer_cls_names_to_wrap": names, "folder": given.folder})
        assert {"", "blocks.0", "blocks.1"} <= set(told)
        assert ("first" in told) is ("Linear" in names)


SHARDING = {
    "fsdp_version": refused("fully_shard", value=1),
    "sharding_strategy": _hybrid,
    "reshard_after_forward": sharded(False, _of("reshard_after_forward", False)),
    "backward_prefetch": refused("BACKWARD_PRE", value="BACKWARD_POST"),
    "mixed_precision_policy": sharded(
        {"param_dtype": "bf16"}, _of("mp_policy", MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    ),
    "auto_wrap_policy": sharded("no_wrap", _units()),
    "cpu_offload": sharded(True, _offloaded),
    "ignored_modules": sharded("first", _not_sharded),
    "state_dict_type": _layout,
    "state_dict_config": refused("state_dict_type"),
    "optim_state_dict_config": refused("state_dict_type"),
    "limit_all_gathers": refused("leave it out", value=False),
    "use_orig_params": refused("leave it out", value=False),
    "param_init_fn": _values,
    "sync_module_states": _same_start,
    "forward_prefetch": _prefetched,
    "activation_checkpointing": _checkpointed,
    "activation_checkpointing_offload": refused("activation_checkpointing=True"),
    "cpu_ram_efficient_loading": _only_main_has_values,
    "transformer_cls_names_to_wrap": _by_class,
    "min_num_params": sharded(
        10, _units("first", "blocks.0.inner", "blocks.1.inner"), auto_wrap_policy="size_based_wrap"
    ),
}

# ---------------------------------------------------------------------- DeepSpeed, meshes


def configured(value, *path, wanted=None, **more):
    def check(given):
        given.value = value
        found = given.make(**more).deepspeed_config
        for key in path:
            found = found[key]
        assert found == (value if wanted is None else wanted)

    return check


def _largest_batch(given):
    given.value = False
    plugin = given.make()
    loaders = [DataLoader(range(8), batch_size=size) for size in (2, 4)]
    complete(plugin, loaders, GradientState())
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == 4
    smallest = DeepSpeedPlugin()
    complete(smallest, loaders, GradientState())
    assert smallest.deepspeed_config["train_micro_batch_size_per_gpu"] == 2


DEEPSPEED = {
    "hf_ds_config": configured({"a": {"b": 3}}, "a", "b", wanted=3),
    "gradient_accumulation_steps": configured(3, "gradient_accumulation_steps"),
    "gradient_clipping": configured(0.5, "gradient_clipping"),
    "zero_stage": configured(3, "zero_optimization", "stage"),
    "is_train_batch_min": _largest_batch,
    "offload_optimizer_device": configured(
        "cpu", "zero_optimization", "offload_optimizer", "device"
    ),
    "offload_param_device": configured("cpu", "zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": configured(
        "/n",
        *("zero_optimization", "offload_optimizer", "nvme_path"),
        offload_optimizer_device="nvme",
    ),
    "offload_param_nvme_path": configured(
        "/n", "zero_optimization", "offload_param", "nvme_path", offload_param_device="nvme"
    ),
    "zero3_init_flag": refused("deepspeed.zero.Init()"),
    "zero3_save_16bit_model": configured(
        True, "zero_optimization", "stage3_gather_16bit_weights_on_model_save"
    ),
    "transformer_moe_cls_names": refused("set_z3_leaf_modules", value="Block"),
}


def sized(given):
    given.value = 2
    assert given.make().total_size == 2


def _old_name(given):
    given.value = 2
    with pytest.raises(OptionError, match="for 2 processes, and there are 1"):
        Accelerator(cpu=True, torch_tp_plugin=given.make())


def _handler(given):
    given.value = TorchTensorParallelConfig()
    assert given.make(tp_size=2).tp_handler is given.value


def _pipeline_handler(given):
    given.value = PipelineParallelConfig(microbatches=3)
    accelerator = Accelerator(cpu=True, engine="pp", parallelism_config=given.make())
    assert accelerator.engine.setup.option(PipelineParallelConfig) is given.value


def _microbatches(given):
    given.value = 3
    pipeline = _pipeline(given.make(example_inputs=torch.zeros(1, 2))).engine.pipeline
    assert pipeline.microbatches == 3
    with pytest.raises(OptionError, match="microbatches=0"):
        PipelineParallelConfig(microbatches=0)


def _schedule(given):
    given.value = "gpipe"
    pipeline = _pipeline(given.make(example_inputs=torch.zeros(1, 2))).engine.pipeline
    assert pipeline._kind == "ScheduleGPipe"
    with pytest.raises(OptionError, match="give '1f1b' or 'gpipe'"):
        PipelineParallelConfig(schedule="fast")


def _example(given):
    given.value = torch.zeros(1, 2)
    _pipeline(given.make())
    with pytest.raises(OptionError, match="example_inputs"):
        _pipeline(PipelineParallelConfig())


def _pipeline(config):
    parallel = ParallelismConfig(pp_handler=config)
    accelerator = Accelerator(cpu=True, engine="pp", parallelism_config=parallel)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.ones(3, 2)
    loss = accelerator.train_step(
        model, x, targets=torch.zeros(3, 1), loss_function=nn.functional.mse_loss
    )
    before = loss.item()
    optimizer.step()
    with torch.no_grad():
        assert model(x).square().mean() < before
    return accelerator


PIPELINES = {
    "microbatches": _microbatches,
    "schedule": _schedule,
    "example_inputs": _example,
}

MESHES = {
    "dp_replicate_size": sized,
    "dp_shard_size": sized,
    "tp_size": sized,
    "cp_size": refused("tp_size", value=2),
    "cp_backend": refused("tp_size", value="torch"),
    "cp_handler": refused("tp_size", value=object()),
    "sp_size": refused("DeepSpeed", value=2),
    "sp_backend": refused("DeepSpeed", value="deepspeed"),
    "sp_handler": refused("DeepSpeed", value=object()),
    "tp_handler": _handler,
    "pp_size": sized,
    "pp_handler": _pipeline_handler,
}

# ---------------------------------------------------------------------- the loop


def compiled(value, **more):
    def check(given):
        given.value = value
        plugin = given.make(**{"backend": "eager", **more} if given.field != "backend" else more)
        with mock.patch.object(torch, "compile", return_value=nn.Identity()) as called:
            Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Net())
        assert called.call_args.kwargs[given.field] == value

    return check


def regional(given):
    given.value = True
    plugin = given.make(backend="eager")
    model = Accelerator(cpu=True, dynamo_plugin=plugin).prepare(Net())
    assert [block._compiled_call_impl is not None for block in model.blocks] == [True, True]


def accumulated(value, wanted):
    """At which of five calls gradients are whole, over a loader of five batches."""

    def check(given):
        given.value = value
        plugin = given.make(**({} if given.field == "num_steps" else {"num_steps": 2}))
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, schedule, loader = accelerator.prepare(
            model, optimizer, schedule, DataLoader(torch.ones(5, 1), 1)
        )
        ends, exchanged = [], []
        for batch in loader:
            with (
                mock.patch.object(
                    accelerator.engine, "no_sync", return_value=contextlib.nullcontext()
                ) as withheld,
                accelerator.accumulate(model),
            ):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            ends.append(accelerator.sync_gradients)
            exchanged.append(not withheld.called)
        found = {"ends": ends, "exchanged": exchanged, "count": schedule.scheduler._step_count}
        assert {key: found[key] for key in wanted} == wanted

    return check


def loader_has(value, look, data=range(6), **more):
    def check(given):
        given.value = value
        accelerator = Accelerator(cpu=True, dataloader_config=given.make(**more))
        assert getattr(accelerator.dataloader_config, given.field) == value
        assert look(accelerator.prepare(DataLoader(data, 2, shuffle=True)))

    return check


def _order(loader):
    return [x.tolist() for x in loader]


def _seeded(given):
    orders = []
    for seed in (3, 3, 4):
        config = DataLoaderConfiguration(data_seed=seed)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(
            DataLoader(range(40), 2, shuffle=True)
        )
        orders.append(_order(loader))
    assert orders[0] == orders[1] != orders[2]


def _without_waiting(given):
    for wanted in (True, False):
        config = DataLoaderConfiguration(non_blocking=wanted)
        loader = Accelerator(cpu=True, dataloader_config=config).prepare(DataLoader(range(2)))
        loader.device = torch.device("meta")
        with mock.patch("anydevice.data.loaders.send_to_device") as sent:
            next(iter(loader))
        assert sent.call_args.kwargs["non_blocking"] is wanted


def _stateful(loader):
    from torchdata.stateful_dataloader import StatefulDataLoader

    return isinstance(loader, StatefulDataLoader)


def _dispatched(loader):
    return type(loader).__name__ == "DataLoaderDispatcher"


def project(value, look, **more):
    def check(given):
        given.value = given.folder / value if isinstance(value, str) else value
        config = given.make(**{"project_dir": str(given.folder), **more})
        accelerator = Accelerator(cpu=True, project_config=config)
        accelerator.prepare(nn.Linear(1, 1))
        assert look(accelerator, given.folder)

    return check


def _in(given):
    config = ProjectConfiguration(project_dir=str(given.folder / "run"))
    assert Accelerator(cpu=True, project_config=config).project_dir == str(given.folder / "run")


def _named(accelerator, folder):
    return Path(accelerator.save_state()) == folder / "checkpoints" / "checkpoint_0"


def _limited(accelerator, folder):
    for _ in range(3):
        accelerator.save_state()
    return [p.name for p in (folder / "checkpoints").iterdir()] == ["checkpoint_2"]


def _from_seven(accelerator, folder):
    return Path(accelerator.save_state()).name == "checkpoint_7"


def _without_the_others(accelerator, folder):
    with mock.patch.object(type(accelerator.state._partial), "meet") as met:
        accelerator.save_state(str(folder / "alone"))
    return (folder / "alone").is_dir() and not met.called


def _on_each_machine(accelerator, folder):
    state = accelerator.state._partial
    with mock.patch.multiple(type(state), is_main_process=False, is_local_main_process=True):
        alone = mock.patch.multiple(
            type(accelerator), is_main_process=False, is_local_main_process=True
        )
        with alone:
            return accelerator.should_save_model


LOOP = {
    TorchDynamoPlugin: {
        "backend": compiled("eager"),
        "mode": compiled("reduce-overhead"),
        "fullgraph": compiled(True),
        "dynamic": compiled(True),
        "options": compiled({"a": 1}),
        "disable": compiled(True),
        "use_regional_compilation": regional,
    },
    GradientAccumulationPlugin: {
        "num_steps": accumulated(3, {"ends": [False, False, True, False, True]}),
        "adjust_scheduler": accumulated(False, {"count": 4}),
        "sync_with_dataloader": accumulated(False, {"ends": [False, True, False, True, False]}),
        "sync_each_batch": accumulated(True, {"exchanged": [True] * 5}),
    },
    DataLoaderConfiguration: {
        "split_batches": loader_has(True, lambda loader: len(loader) == 3),
        "dispatch_batches": loader_has(True, _dispatched),
        "even_batches": loader_has(False, lambda loader: len(loader) == 3),
        "use_seedable_sampler": loader_has(True, lambda loader: len(_order(loader)) == 3),
        "data_seed": _seeded,
        "non_blocking": _without_waiting,
        "use_stateful_dataloader": pytest.param(
            loader_has(True, _stateful), marks=pytest.mark.filterwarnings("ignore:'set_vital'")
        ),
    },
    ProjectConfiguration: {
        "project_dir": _in,
        "logging_dir": project("logs", lambda a, folder: a.logging_dir == folder / "logs"),
        "automatic_checkpoint_naming": project(True, _named),
        "total_limit": project(1, _limited, automatic_checkpoint_naming=True),
        "iteration": project(7, _from_seven, automatic_checkpoint_naming=True),
        "save_on_each_node": project(True, _on_each_machine),
        "save_state_alone": project(True, _without_the_others),
    },
}

TABLE = {
    **HANDLERS,
    **LOOP,
    FullyShardedDataParallelPlugin: SHARDING,
    DeepSpeedPlugin: DEEPSPEED,
    ParallelismConfig: MESHES,
    PipelineParallelConfig: PIPELINES,
    TorchTensorParallelConfig: {"enable_async_tp": refused("there")},
    TorchTensorParallelPlugin: {
        "tp_size": _old_name,
        "torch_device_mesh": refused("ParallelismConfig", value=object()),
    },
}


@pytest.fixture(autouse=True)
def _no_group():
    yield
    if torch.distributed.is_initialized():
        PartialState().destroy_process_group()


def rows():
    for kind, fields in TABLE.items():
        for field, check in fields.items():
            name, marks = f"{kind.__name__}.{field}", ()
            if not callable(check):
                (check,), marks = check.values, check.marks
            yield pytest.param(kind, field, check, id=name, marks=marks)


@pytest.mark.parametrize("kind", TABLE)
def test_each_field_has_a_row(kind):
    assert {field.name for field in dataclasses.fields(kind)} == set(TABLE[kind])


@pytest.mark.parametrize(("kind", "field", "check"), [*rows()])
def test_a_choice_does_what_it_says_or_is_refused(kind, field, check, tmp_path):
    check(Given(kind, field, None, tmp_path))
