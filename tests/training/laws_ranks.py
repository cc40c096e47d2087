"""Ranks for `test_laws.py`: what holds on several processes, in one launch."""

from __future__ import annotations

import copy
import datetime
import logging
import time
import traceback
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from training.loops import Net, fails, fresh

from anydevice import dispatch_model
from anydevice.data import DataLoaderConfiguration
from anydevice.engines import (
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from anydevice.errors import CollectiveMismatchError, MissingRankError, ModelError, OptionError
from anydevice.handlers import GradScalerKwargs, InitProcessGroupKwargs
from anydevice.processes import meeting
from anydevice.training import Accelerator
from anydevice.training.local_sgd import LocalSGD
from anydevice.utils import extract_model_from_parallel


class Stream(IterableDataset):
    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return iter(range(self.length))


def accelerator(**options):
    fresh()
    return Accelerator(cpu=True, **options)


def scheduler_counts_batches_of_one_process(rank, size):
    for unit, each in (("batches", size), ("steps", 1)):
        a = accelerator(scheduler_unit=unit, gradient_accumulation_steps=2)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, scheduler = a.prepare(model, optimizer, scheduler)
        for _ in range(4):
            with a.accumulate(model):
                a.backward(model(torch.ones(1, 1)).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        assert scheduler.get_last_lr() == [1 / (1 + 2 * each)], (unit, scheduler.get_last_lr())


def scheduler_counts_those_that_share_a_batch_once(rank, size):
    for groups in range(1, size + 1):
        if size % groups:
            continue
        sizes = {"tp_size": size // groups}
        if groups > 1:
            sizes["dp_shard_size"] = groups
        a = accelerator(parallelism_config=ParallelismConfig(**sizes))
        optimizer = a.prepare(torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        scheduler = a.prepare(scheduler)
        optimizer.step()
        scheduler.step()
        assert scheduler.get_last_lr() == [1 / (1 + groups)], (sizes, scheduler.get_last_lr())


def counted_items_weigh(rank, size):
    """Micro-batches of 1 to 5 items, differently many on each rank, give one batch's gradient."""
    for engine in ("ddp", "fsdp2"):
        plugin = FullyShardedDataParallelPlugin() if engine == "fsdp2" else None
        a = accelerator(gradient_accumulation_steps=3, fsdp_plugin=plugin)
        model = nn.Linear(3, 1)
        generator = torch.Generator().manual_seed(4)
        parts = [
            torch.randn(1 + (5 * r + i) % 5, 3, generator=generator)
            for r in range(size)
            for i in range(3)
        ]
        whole = torch.cat(parts)
        (model(whole) ** 2).mean().backward()
        wanted = model.weight.grad.clone()
        model.zero_grad()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model, optimizer = a.prepare(model, optimizer)
        for part in parts[3 * rank : 3 * rank + 3]:
            with a.accumulate(model):
                a.backward((model(part) ** 2).mean(), num_items=len(part))
                a.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
        grad = a.unwrap_model(model).weight.grad
        grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        torch.testing.assert_close(grad, wanted)


def several_models_accumulate(rank, size):
    a = accelerator(gradient_accumulation_steps=2)
    one, two = a.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    x = torch.full((1, 1), float(rank + 1))
    seen = []
    for _ in range(2):
        with a.accumulate(one, two):
            a.backward(one(x).sum() + two(x).sum())
        seen.append([m.module.weight.grad.item() for m in (one, two)])
    mean = (size + 1) / 2
    assert seen[0] == [(rank + 1) / 2] * 2, seen  # not yet exchanged
    assert seen[1] != seen[0]
    both = a.gather(torch.tensor(seen[1]))
    assert both.unique().numel() == 1, both
    assert abs(both[0].item() - mean) < 1e-6, both


def every_sample_once(rank, size):
    """`gather_for_metrics`: what goes in comes out, whatever was repeated."""
    for length in (0, 1, 3, 5, 8, 11):
        for batch in (1, 3):
            for options in (
                {},
                {"even_batches": False},
                {"dispatch_batches": True},
                {"split_batches": True},
                {"split_batches": True, "dispatch_batches": True},
            ):
                for data in (list(range(length)), Stream(length)):
                    even = options.get("even_batches", True)
                    per_round = batch * size
                    if not even and length % per_round and length % per_round <= batch * (size - 1):
                        continue  # some ranks make a round less: see join_uneven_inputs
                    rows = batch * size if options.get("split_batches") else batch
                    a = accelerator(dataloader_config=DataLoaderConfiguration(**options))
                    loader = a.prepare(DataLoader(data, rows))
                    got = {"x": [], "pair": [], "twice": [], "words": []}
                    for x in loader:
                        out = a.gather_for_metrics(
                            {
                                "x": x,
                                "pair": (x, torch.stack([x, -x], 1)),
                                "twice": x.repeat_interleave(2),
                            }
                        )
                        got["x"] += out["x"].tolist()
                        got["pair"] += out["pair"][1][:, 1].neg().tolist()
                        got["twice"] += out["twice"].tolist()
                        got["words"] += a.gather_for_metrics([f"{n}" for n in x.tolist()])
                    wanted = list(range(length))
                    where = (length, batch, options, type(data).__name__, got)
                    assert sorted(got["x"]) == wanted, where
                    assert sorted(got["pair"]) == wanted, where
                    assert sorted(got["twice"]) == sorted([*wanted, *wanted]), where
                    assert sorted(got["words"], key=int) == [str(n) for n in wanted], where
    a = accelerator()
    for x in a.prepare(DataLoader(list(range(3)), 2)):
        with fails(OptionError, "which rows are theirs"):
            a.gather_for_metrics(torch.zeros(2 * len(x) + 1))
        assert a.gather_for_metrics(x.float().mean()).shape == (2,)
    with fails(TypeError):
        a.gather_for_metrics({"x": torch.ones(1), "y": object()})


def uneven_inputs_join(rank, size):
    a = accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.ones(2 * size + 1, 1))
    model, optimizer, loader = a.prepare(model, optimizer, DataLoader(data, 1))
    steps = 0
    with a.join_uneven_inputs([model]):
        for (x,) in loader:
            a.backward(model(x).sum())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == (3 if rank == 0 else 2), steps
    weights = a.gather(model.module.weight.detach().reshape(1))
    assert weights.unique().numel() == 1, weights
    a = accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = a.prepare(nn.Linear(1, 1))
    with fails(OptionError, "fsdp2"), a.join_uneven_inputs([model]):
        pass
    a = accelerator()
    loader = a.prepare(DataLoader(list(range(size + 1)), 1))
    model = a.prepare(nn.Linear(1, 1))
    with a.join_uneven_inputs([model], even_batches=False):
        assert len(list(loader)) == (2 if rank == 0 else 1)
    assert len(list(loader)) == 2


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5:
            raise KeyError("sample 5 is gone")
        return index


def dispatching_sends_each_its_own(rank, size):
    a = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    read = []

    class Ragged(Dataset):
        def __len__(self):
            return 2 * size

        def __getitem__(self, index):
            read.append(index)
            return {"x": torch.arange(index + 1), "name": f"n{index}"}

    loader = a.prepare(DataLoader(Ragged(), 1, collate_fn=lambda batch: batch[0]))
    got = [(len(batch["x"]), batch["name"]) for batch in loader]
    assert got == [(1 + rank, f"n{rank}"), (1 + rank + size, f"n{rank + size}")], got
    assert bool(read) == (rank == 0)
    assert len(loader) == 2
    loader = a.prepare(DataLoader(Broken(), 1))
    kind = KeyError if rank == 0 else RuntimeError
    with fails(kind, "sample 5 is gone"):
        list(loader)


def a_dispatched_loader_resumes(rank, size):
    a = accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True, data_seed=3))
    loader = a.prepare(DataLoader(list(range(8 * size)), 2, shuffle=True))
    whole = [b.tolist() for b in loader]
    loader.set_epoch(0)
    assert [b.tolist() for b in a.skip_first_batches(loader, 2)] == whole[2:]


def overflow_skips_on_all(rank, size):
    for plugin in (None, FullyShardedDataParallelPlugin()):
        a = accelerator(
            mixed_precision="fp16",
            fsdp_plugin=plugin,
            kwargs_handlers=[GradScalerKwargs(init_scale=1024.0, growth_interval=1)],
        )
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        model, optimizer, scheduler = a.prepare(model, optimizer, scheduler)
        before = {k: v.clone() for k, v in a.get_state_dict(model).items()}
        x = torch.full((1, 2), float("inf") if rank == size - 1 else 1.0)
        a.backward(model(x).sum())
        a.clip_grad_norm_(model.parameters(), 1.0)
        a.clip_grad_norm_(model.parameters(), 1.0)  # unscaled once, however often it is asked for
        optimizer.step()
        scheduler.step()
        assert a.optimizer_step_was_skipped
        assert optimizer.step_was_skipped
        assert a.scaler.get_scale() == 512.0
        assert scheduler.get_last_lr() == [0.1]
        for name, value in a.get_state_dict(model).items():
            assert torch.equal(value, before[name]), name
        optimizer.zero_grad()
        a.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        assert not a.optimizer_step_was_skipped
        assert a.scaler.get_scale() == 1024.0


def local_sgd_averages(rank, size):
    a = accelerator()
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = a.prepare(model, optimizer)
    with LocalSGD(accelerator=a, model=model, local_sgd_steps=2) as local:
        for step in range(3):
            a.backward(model(torch.full((1, 1), float(rank))).sum())
            optimizer.step()
            optimizer.zero_grad()
            local.step()
            now = a.gather(model.module.weight.detach().reshape(1))
            assert (now.unique().numel() == 1) == (step == 1), (step, now)
    now = a.gather(model.module.weight.detach().reshape(1))
    assert now.unique().numel() == 1
    sharded = accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    with fails(OptionError, "fsdp2"):
        LocalSGD(sharded, sharded.prepare(nn.Linear(1, 1)), 2)


def communication_hooks(rank, size):
    for options in (
        {"comm_hook": "fp16"},
        {"comm_hook": "bf16"},
        {
            "comm_hook": "power_sgd",
            "comm_wrapper": "fp16",
            "comm_state_option": {"matrix_approximation_rank": 2},
        },
        {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 1},
    ):
        a = accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        model = a.prepare(nn.Linear(2, 2))
        a.backward(model(torch.full((1, 2), float(rank + 1))).sum())
        grad = a.gather(model.module.weight.grad.reshape(1, -1))
        assert torch.equal(grad[0], grad[-1]), options
        assert abs(grad[0, 0].item() - (size + 1) / 2) < 0.05, options


def triggers_and_objects(rank, size):
    a = accelerator()
    assert not a.check_trigger()
    if rank == size - 1:
        a.set_trigger()
    assert a.check_trigger()
    assert not a.check_trigger()
    with a.split_between_processes(list(range(size + 1)), apply_padding=True) as mine:
        assert len(mine) == 2
    assert a.gather_for_metrics(["a", rank], use_gather_object=True) == [
        item for r in range(size) for item in ("a", r)
    ]
    model = a.prepare(nn.Linear(1, 1))
    with a.no_sync(model):
        out = model(torch.full((1, 1), float(rank + 1)))
    with a.trigger_sync_in_backward(model):
        a.backward(out.sum())
    assert abs(model.module.weight.grad.item() - (size + 1) / 2) < 1e-6


def a_call_that_not_all_make(rank, size, folder):
    """`save_state` by the main process alone: an error on both sides that names the lines."""
    a = Accelerator(
        cpu=True,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=20))],
    )
    a.prepare(nn.Linear(1, 1))
    _who_waits_says_so(a, folder)
    try:
        if a.is_main_process:
            a.save_state(folder)
        else:
            a.wait_for_everyone()
    except (CollectiveMismatchError, MissingRankError) as error:
        return str(error)
    return "no error"


def _who_waits_says_so(a, folder):
    """Rank 0 waits for rank 1, which comes when it has heard of that."""
    heard = Path(folder).with_suffix(".heard")

    class Hears(logging.Handler):
        def emit(self, record):
            heard.write_text(record.getMessage())

    logger, handler = logging.getLogger(meeting.__name__), Hears()
    logger.addHandler(handler)
    with mock.patch.object(meeting.Meetings, "notice_after", 0.0):
        while not a.is_main_process and not heard.exists():
            time.sleep(0.01)
        a.wait_for_everyone()
    logger.removeHandler(handler)
    text = heard.read_text()
    assert "rank 0 has waited 0 s in wait_for_everyone for rank 1" in text, text
    assert "laws_ranks.py:" in text, text


def dispatched_models(rank, size, folder):
    """One process trains a model that is spread over its devices; several do not."""
    fresh()
    accelerator = Accelerator()
    if size > 1:
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        model = dispatch_model(model, {"0": "sim:0", "1": "sim:1"})
        with fails(ModelError, "one process", "fsdp_plugin"):
            accelerator.prepare(model)
        return True
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    torch.manual_seed(0)
    raw = copy.deepcopy(model)
    model = dispatch_model(model, {"0": "sim:0", "1": "sim:1"})
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    raw(torch.ones(4, 2)).sum().backward()
    torch.optim.SGD(raw.parameters(), lr=0.1).step()
    assert {p.device.index for p in model.parameters()} == {0, 1}
    for a, b in zip(model.parameters(), raw.parameters(), strict=True):
        torch.testing.assert_close(a.cpu(), b)
    assert accelerator.verify_device_map(model)
    on_disk = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    on_disk = dispatch_model(on_disk, {"0": "sim:0", "1": "disk"}, offload_dir=folder)
    with fails(ModelError, "'1.weight', '1.bias' rest on the disk"):
        accelerator.prepare(on_disk)
    on_disk.requires_grad_(False)
    on_disk[1] = Adapted(on_disk[1])
    adapter = on_disk[1].adapter.weight
    before = adapter.detach().clone()
    model, optimizer = accelerator.prepare(Around(on_disk), torch.optim.SGD([adapter], lr=0.1))
    accelerator.backward(model(torch.ones(4, 2)).sum())
    optimizer.step()
    assert not torch.equal(adapter, before)
    return True


class Adapted(nn.Module):
    """A frozen layer, and one beside it that is trained."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.adapter = nn.Linear(3, 1)

    def forward(self, x):
        return self.layer(x) + self.adapter(x)


class Around(nn.Module):
    """A model in another one that passes its attributes on, as peft's do."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)

    def forward(self, x):
        return self.base(x)


def sharding_options(rank, size):
    """Which modules are units, what is left alone, and where the first values come from."""
    torch.manual_seed(0)
    wanted = Net().state_dict()
    x = torch.ones(2, 4)
    for options in (
        {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100},
        {"transformer_cls_names_to_wrap": ["Block"]},
        {"auto_wrap_policy": "no_wrap"},
        {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: nonwrapped_numel > 150},
        {"ignored_modules": r"blocks\.1\..*"},
        {"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "fp32"}},
        {"cpu_ram_efficient_loading": True},
        {"cpu_ram_efficient_loading": True, "cpu_offload": True},
    ):
        a = accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options))
        lazily = options.get("cpu_ram_efficient_loading") and rank
        torch.manual_seed(0 if rank == 0 else 7)  # other ranks' own values do not count
        with torch.device("meta" if lazily else "cpu"):
            model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = a.prepare(model, optimizer)
        state = a.get_state_dict(model)
        if rank == 0:
            for name, value in wanted.items():
                assert torch.equal(state[name], value), (options, name)
        units = sum(isinstance(m, FSDPModule) for m in model.modules())
        assert units == (1 if options.get("auto_wrap_policy") == "no_wrap" else units), options
        assert units > 1 or options.get("auto_wrap_policy") == "no_wrap", options
        whole = isinstance(model.blocks[1].up.weight, DTensor)
        assert whole != ("ignored_modules" in options), options
        a.backward(model(x).float().sum())
        optimizer.step()
        after = a.get_state_dict(model)
        assert rank or not torch.equal(after["first.weight"], wanted["first.weight"]), options
    a = accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Layer"])
    )
    with fails(OptionError, "no 'Layer'", "Block"):
        a.prepare(Net())
    a = accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = Net()
    late = torch.optim.SGD(model.parameters(), lr=0.1)
    a.prepare(model)
    with fails(OptionError, "in one call"):
        a.prepare(late)


class Shares(nn.Module):
    """An inner module that the outer one has, too, and one weight in two others."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        self.again = self.inner[0]
        self.tied = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.tied[1].weight = self.tied[0].weight
        self.plain = nn.Linear(4, 4)

    def forward(self, x):
        return self.plain(self.tied[1](self.tied[0](self.again(self.inner(x)))))


def what_two_units_share_is_sharded_once(rank, size):
    """Any policy may choose units that share parameters: those are their common parent's."""
    x = torch.ones(2, 4)
    wanted = Shares()
    wanted(x).sum().backward()

    def chosen(module, recurse, nonwrapped_numel):
        return isinstance(module, (nn.Linear, nn.Sequential))

    a = accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(auto_wrap_policy=chosen))
    plain = Shares()
    model, _ = a.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    a.backward(model(x).sum())
    for (name, was), now in zip(wanted.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(now.grad.full_tensor(), was.grad, msg=name)
    names = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert names == ["", "inner.1", "plain"], names


def taking_a_compiled_model_out_leaves_it(rank, size):
    """The user's compiled DDP model still averages gradients afterwards."""
    a = accelerator()
    plain = nn.Linear(2, 2)
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(plain), backend="eager")
    out = extract_model_from_parallel(wrapped)
    assert type(out) is type(wrapped)
    assert out._orig_mod is plain
    assert out is not wrapped
    assert isinstance(wrapped._orig_mod, nn.parallel.DistributedDataParallel)
    assert extract_model_from_parallel(out) is out
    assert extract_model_from_parallel(wrapped, keep_torch_compile=False) is plain
    x = torch.full((1, 2), float(rank))
    assert torch.equal(out(x), plain(x))
    wrapped(x).sum().backward()
    mean = a.reduce(x[0], "mean").expand(2, 2)
    torch.testing.assert_close(plain.weight.grad, mean)


CHECKS = [
    taking_a_compiled_model_out_leaves_it,
    sharding_options,
    what_two_units_share_is_sharded_once,
    scheduler_counts_batches_of_one_process,
    scheduler_counts_those_that_share_a_batch_once,
    counted_items_weigh,
    several_models_accumulate,
    every_sample_once,
    uneven_inputs_join,
    dispatching_sends_each_its_own,
    a_dispatched_loader_resumes,
    overflow_skips_on_all,
    local_sgd_averages,
    communication_hooks,
    triggers_and_objects,
]


def all_checks(rank, size):
    """Names of the checks that failed, with their tracebacks."""
    failed = {}
    for check in CHECKS:
        try:
            check(rank, size)
        except Exception:  # noqa: BLE001 - the test shows it
            failed[check.__name__] = traceback.format_exc()
            break  # the other ranks may be elsewhere now
    return failed
