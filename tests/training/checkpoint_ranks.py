"""Ranks for `test_checkpoints.py`: stopping and going on, on other numbers of ranks and engines."""

from __future__ import annotations

import copy
import functools
import os
import random
import resource
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path
from unittest import mock

import torch
from torch import nn
from torch.utils.data import DataLoader
from training.loops import close, data, fails, fresh, make, parts, plain_loop, prepared_loop

from anydevice.data import DataLoaderConfiguration
from anydevice.engines import FullyShardedDataParallelPlugin
from anydevice.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    OptionError,
    ProcessGroupError,
)
from anydevice.training import Accelerator, ProjectConfiguration
from anydevice.training.checkpoints.folders import Writing

GLOBAL = 8  # samples in one optimizer step, on any number of ranks
STOP = 3  # optimizer steps before stopping: two epochs have four


def _loop(engine, size, precision="no", **options):
    together = 1 if engine == "tp" else size
    accelerator = make(
        engine,
        precision,
        dataloader_config=DataLoaderConfiguration(
            data_seed=5, use_stateful_dataloader=False, split_batches=False
        ),
    )
    return prepared_loop(accelerator, GLOBAL // together, steps=6, **options), accelerator


def stop_in_the_middle(rank, size, folder):
    """Train 3 of 6 steps with each engine, and save; some on safetensors, some in parts."""
    for engine in ("ddp", "fsdp2", "fsdp2-full", "tp"):
        if size == 1 and engine != "ddp":
            continue
        fresh()
        _save_with(engine, size, Path(folder) / f"{engine}-{size}")
    return sorted(p.name for p in Path(folder).iterdir())


def _save_with(engine, size, where):
    (_, things), accelerator = _loop(engine.removesuffix("-full"), size, stop=STOP)
    if engine.endswith("full"):
        plugin = accelerator.state.fsdp_plugin
        plugin.set_state_dict_type("FULL_STATE_DICT")
    accelerator.save_state(where)
    return things


def go_on(rank, size, folder, saved):
    """Load what another number of ranks saved with each engine: the rest is as if not stopped."""
    for name in saved:
        for engine in ("ddp", "fsdp2"):
            if size == 1 and engine != "ddp":
                continue
            fresh()
            accelerator = make(engine)
            accelerator._resumes = True
            found = prepared_loop(
                accelerator, GLOBAL // size, steps=6, stop=STOP, resume=Path(folder) / name
            )
            close(found, plain_loop(GLOBAL, steps=6), 2e-4, name)
    return True


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value, "kind": "counter"}

    def load_state_dict(self, state):
        self.value = state["value"]


def everything_comes_back(rank, size, folder):
    """Random states, schedulers, loaders, registered objects, hooks; names and limits."""
    fresh()
    project = ProjectConfiguration(
        str(Path(folder) / "run"), automatic_checkpoint_naming=True, total_limit=2
    )
    a = Accelerator(
        cpu=True, project_config=project, dataloader_config=DataLoaderConfiguration(data_seed=1)
    )
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(data(), 2, shuffle=True)
    with fails(CheckpointNotFoundError, "none was saved yet"):
        a.load_state()
    model, optimizer, scheduler, loader = a.prepare(model, optimizer, scheduler, loader)
    counter = Counter()
    a.register_for_checkpointing(counter)
    with fails(OptionError, "has no state_dict()"):
        a.register_for_checkpointing(3)
    calls = []
    a.register_save_state_pre_hook(lambda m, w, d: calls.append((len(m), len(w))))
    a.register_load_state_pre_hook(lambda m, d: calls.append((len(m), Path(d).name)))
    for _ in range(3):
        for number, (x, y) in enumerate(loader):
            a.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if number == 1:
                break
        counter.value += 1
        a.save_state()
    folders = sorted(p.name for p in (Path(folder) / "run" / "checkpoints").iterdir())
    assert folders == ["checkpoint_1", "checkpoint_2"], folders
    drawn = torch.rand(2).tolist(), random.random()
    weights = {k: v.clone() for k, v in a.get_state_dict(model).items()}
    rate = scheduler.get_last_lr()
    loader.load_state_dict(loader.state_dict())  # the rest of the epoch that was left
    rest = [x.tolist() for x, _ in loader]
    with torch.no_grad():
        model.module.weight.zero_()
    counter.value = 0
    torch.rand(5)
    a.load_state()
    assert (torch.rand(2).tolist(), random.random()) == drawn
    assert counter.value == 3
    assert scheduler.get_last_lr() == rate
    for name, value in a.get_state_dict(model).items():
        assert torch.equal(value, weights[name]), name
    assert [x.tolist() for x, _ in a.skip_first_batches(loader, 2)] == rest
    assert calls == [(1, 1)] * 3 + [(1, "checkpoint_2")], calls
    # The number comes from the disk: another run in the same place goes on from there.
    fresh()
    again = Accelerator(
        cpu=True,
        project_config=ProjectConfiguration(
            str(Path(folder) / "run"), automatic_checkpoint_naming=True
        ),
    )
    again.prepare(nn.Linear(4, 4))
    assert Path(again.save_state()).name == "checkpoint_3"
    with fails(OptionError, "no argument 'maximum'"):
        again.save_state(maximum=3)
    with fails(CheckpointNotFoundError, "no folder"):
        again.load_state(Path(folder) / "nowhere")
    return True


def hooks_take_over(rank, size, folder):
    """A hook that writes and reads the model itself, as diffusers' scripts do."""
    fresh()
    a = Accelerator(cpu=True)
    plain = nn.Linear(3, 3)
    model = a.prepare(plain)

    def save(models, weights, output_dir):
        if a.is_main_process:
            for _ in models:
                torch.save(a.unwrap_model(models[0]).state_dict(), Path(output_dir) / "own.pt")
                weights.pop()
        else:
            weights.clear()

    def load(models, input_dir):
        while models:
            a.unwrap_model(models.pop()).load_state_dict(torch.load(Path(input_dir) / "own.pt"))

    a.register_save_state_pre_hook(save)
    handle = a.register_load_state_pre_hook(load)
    where = Path(folder) / "own"
    a.save_state(where)
    names = {p.name for p in where.iterdir()}
    assert "own.pt" in names, names
    assert "model.safetensors" not in names, names
    before = plain.weight.detach().clone()
    with torch.no_grad():
        plain.weight.zero_()
    a.load_state(where)
    assert torch.equal(plain.weight, before)
    handle.remove()
    with fails(CheckpointNotFoundError, "model.safetensors"):
        a.load_state(where)
    del model
    return True


def saved_by_one(rank, size, folder):
    """`save_state` on the main process alone, as many published scripts make it."""
    project = ProjectConfiguration(
        folder, automatic_checkpoint_naming=True, total_limit=1, save_state_alone=True
    )
    a, model, optimizer, batch = _trainer(project, None)
    for step in range(3):
        _step(a, model, optimizer, batch[rank])
        if a.is_main_process and step < 2:
            a.save_state()
        a.gather(torch.ones(1))  # the others are here meanwhile
    wanted = [p.detach().clone() for p in model.parameters()]
    a.wait_for_everyone()
    place = Path(folder) / "checkpoints"
    assert [path.name for path in place.iterdir()] == ["checkpoint_1"]
    a.load_state()
    _step(a, model, optimizer, batch[rank])
    for was, now in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(now.detach(), was)
    if rank:
        with fails(OptionError, "save_state_alone"):
            a.save_state()
    a.wait_for_everyone()
    fresh()
    sharded = _trainer(project, FullyShardedDataParallelPlugin())[0]
    where = Path(sharded.save_state())  # all processes have a part, and all make the call
    assert {path.name for path in where.glob("random*")} == {
        f"random_states_{rank}.pkl" for rank in range(size)
    }
    return True


def _trainer(project, plugin):
    torch.manual_seed(0)
    a = Accelerator(cpu=True, project_config=project, fsdp_plugin=plugin)
    model = nn.Linear(4, 4)
    model, optimizer = a.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    return a, model, optimizer, torch.randn(2, 3, 4)


def _step(a, model, optimizer, batch):
    a.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def in_the_background(rank, size, folder, cpu):
    """An asynchronous save keeps what was, names its folder last, and tells of its errors."""
    for engine in ("ddp", "fsdp2") if size > 1 else ("single",):
        fresh()
        _save_in_the_background(make(engine, cpu=cpu), Path(folder) / f"{engine}-{size}")
    return True


def _save_in_the_background(a, where):
    model, optimizer = parts()
    model, optimizer = a.prepare(model, optimizer)
    second = a.prepare(nn.Linear(4, 4))
    x = torch.ones(2, 4, device=a.device)
    a.backward(model(x).sum() + second(x).sum())
    optimizer.step()
    wanted = [{k: v.clone() for k, v in a.get_state_dict(m).items()} for m in (model, second)]
    moments = copy.deepcopy(a.engine.state_dict(model, optimizer, full=True))
    events, gate = [], threading.Event()
    begin, commit = Writing.begin, Writing.commit

    def gated(writing):
        assert gate.wait(60)
        commit(writing)
        events.append(("complete", writing.folder.name))

    def noted(writing):
        events.append(("begin", writing.folder.name))
        begin(writing)

    def spoil():
        with torch.no_grad():
            for parameter in (*model.parameters(), *second.parameters()):
                parameter.zero_()
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    with mock.patch.multiple(Writing, begin=noted, commit=gated):
        assert a.save_state(where / "1", asynchronous=True) == str(where / "1")
        assert not (where / "1").exists()
        spoil()  # training goes on: what is written was copied
        a.reduce(x)  # and its collectives do not mix with the background's
        timer = threading.Timer(0.3, gate.set)
        timer.start()
        a.save_state(where / "2", asynchronous=True)
        a.wait_for_save()
    names = ["1", "2"] if a.is_main_process else []
    assert events == [(event, name) for name in names for event in ("begin", "complete")], events
    a.load_state(where / "1")
    for each, weights in zip((model, second), wanted, strict=True):
        for name, value in a.get_state_dict(each).items():
            assert torch.equal(value, weights[name]), name
    again = a.engine.state_dict(model, optimizer, full=True)
    torch.testing.assert_close(again.get("state"), moments.get("state"), rtol=0, atol=0)
    a.wait_for_everyone()

    with mock.patch.object(Writing, "commit", side_effect=OSError("no room on it")):
        a.save_state(where / "1", asynchronous=True)
        with fails(CheckpointError, "rank 0", "no room on it", "'1'"):
            a.save_state(where / "3")
    a.load_state(where / "1")  # as it was
    with fails(OptionError, "asynchronous"):
        a.save_state(where / "3", safe_serialization=False, asynchronous=True)
    assert sorted(p.name for p in where.iterdir()) == ["1", "2"]
    a.save_state(where / "1")  # another layout in the same folder: the last one counts
    spoil()
    a.save_state(where / "1", asynchronous=True)
    a.load_state(where / "1")
    assert not any(value.any() for value in a.get_state_dict(second).values())
    a.wait_for_everyone()


def the_end_waits(rank, size, folder):
    """`end_training` waits; the oldest checkpoint goes when the newest is complete."""
    fresh()
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    a = Accelerator(cpu=True, project_config=project)
    a.prepare(nn.Linear(2, 2))
    gate, commit = threading.Event(), Writing.commit

    def gated(writing):
        assert gate.wait(60)
        commit(writing)

    a.save_state()
    with mock.patch.object(Writing, "commit", gated):
        a.save_state(asynchronous=True)
        a.wait_for_everyone()
        before = sorted(p.name for p in (Path(folder) / "checkpoints").glob("checkpoint_*"))
        a.wait_for_everyone()
        gate.set()
        a.end_training()
    return before, sorted(p.name for p in (Path(folder) / "checkpoints").iterdir())


#: How a checkpoint is saved: into the same folder, whole or in parts; or named, and one is kept.
WAYS = ("whole", "parts", "named")
#: Bytes in one file after which a process ends that is killed while it writes.
SIZES = (0, 40, 300, 900)


def kills(rank, size, folder, most):
    """What is found after a kill at each moment of a second save, by the way of saving.

    Moments are the file operations, each in turn, and the bytes of one file. Processes are forked
    from this one, which has imported everything and started nothing. What a kill before a file
    operation leaves is what is on the disk then: one save is copied at each (in
    `killed_between_ranks` processes are killed there).
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name, None)
    os.fsync = lambda file: None  # a kill loses nothing that is written; only a power cut does
    died = {}
    for way in WAYS:
        assert not _forked(functools.partial(_copy_while_saving, f"{folder}/{way}", way, most))
        last = len([*Path(folder).glob(f"{way}-*")])
        died |= {(way, moment): moment < last for moment in range(1, last + 1)}
        for bytes_ in SIZES:
            work = functools.partial(_die_while_writing, f"{folder}/{way}+{bytes_}", way, bytes_)
            died[way, -bytes_] = _forked(work) == signal.SIGXFSZ
    found = {}
    for (way, moment), by_signal in died.items():
        sign = "-" if moment > 0 else "+"
        found[way, moment] = (by_signal, *_found_in(f"{folder}/{way}{sign}{abs(moment)}", way))
    return found


def _forked(work):
    """Run in a child; return the signal that ended it."""
    return _ended(_start(work))


def _start(work):
    child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001 - shown below
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def _ended(child):
    _, status = os.waitpid(child, 0)
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None


def _copy_while_saving(folder, way, most):
    """Save twice; the second time copy what there is before each file operation, and at the end."""
    save_again = _saved_once(folder, way)
    events = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.rmtree")
    count, mine = 0, False

    def copy_folder():
        nonlocal count, mine
        count, mine = count + 1, True  # the copy's own file operations are none of the save
        assert count < most
        shutil.copytree(folder, f"{folder}-{count}")
        mine = False

    sys.addaudithook(lambda event, args: copy_folder() if event in events and not mine else None)
    save_again()
    mine = False
    copy_folder()


def _die_while_writing(folder, way, most):
    """Save twice; the second time be killed when a file has this many bytes."""
    save_again = _saved_once(folder, way)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python makes an OSError of it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    save_again()


def _saved_once(folder, way):
    """Save weights of 1; return what saves weights of 2."""
    _, model, save = _small(folder, way)
    model.weight.data.fill_(1.0)
    save()
    model.weight.data.fill_(2.0)
    return save


def _small(folder, way):
    """An accelerator, its model, and what saves in one of the ways."""
    fresh()
    if way == "megatron":
        return _small_megatron(folder)
    project = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    a = Accelerator(cpu=True, project_config=project if way == "named" else None)
    model = a.prepare(nn.Linear(2, 2))
    a.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    def save():
        a.save_state(None if way == "named" else folder, asynchronous=way == "parts")
        a.wait_for_save()

    return a, model, save


def _small_megatron(folder):
    from engines import megatron_ranks

    degree = int(os.environ.get("WORLD_SIZE", "1"))  # what ranks divide, one process reads whole
    a, (model, *_) = megatron_ranks.prepared(("gpt2", {"tp_degree": degree}, {}), True)
    return a, model, functools.partial(a.save_state, folder)


def _found_in(folder, way):
    """The weight that is loaded from the folder; and its files, after going on there."""
    a, model, save = _small(folder, way)
    a.load_state(None if way == "named" else folder)
    assert model.weight.unique().numel() == 1
    weight = model.weight[0, 0].item()
    save()
    place = Path(folder) / "checkpoints" if way == "named" else Path(folder)
    return weight, sorted(path.name for path in place.iterdir())


def killed_between_ranks(rank, size, folder, cases, ports):
    """For each case save, and save again, where one rank is killed at a file operation or meeting.

    Each case is a process of its own on each rank, forked from this one, which has started nothing.
    Returns what ended it, or what it was told.
    """
    os.fsync = lambda file: None
    notes, children, signals = [], [], []
    for number, ((way, victim, moment), port) in enumerate(zip(cases, ports, strict=True)):
        os.environ["MASTER_PORT"] = str(port)
        notes.append(Path(f"{folder}/told-{number}-{rank}"))
        dies = moment * (rank == victim)
        where = f"{folder}/{number}"
        children.append(_start(functools.partial(_saved_twice, where, way, dies, notes[-1])))
        if number >= _AT_ONCE:
            signals.append(_ended(children[number - _AT_ONCE]))
    signals += [_ended(child) for child in children[len(signals) :]]
    return [
        f"signal {signal}" if signal else note.read_text()
        for signal, note in zip(signals, notes, strict=True)
    ]


#: Most of their time cases wait for each other.
_AT_ONCE = 6


def _saved_twice(folder, way, moment, note):
    """Save weights of 1, then of 2, and be killed meanwhile. Write down what was told."""
    a, model, save = _small(folder, way)
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    save()
    for parameter in model.parameters():
        parameter.data.fill_(2.0)
    if moment:
        _die_at(moment, a.state._partial)
    try:
        save()
        a.wait_for_everyone()
    except ProcessGroupError as error:
        note.write_text(str(error))
    else:
        note.write_text("saved")


def _die_at(moment, state):
    left = moment

    def count(event, args=()):
        nonlocal left
        if event in ("meet", "open", "os.rename", "os.mkdir", "os.remove"):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    meet = type(state).meet

    def met(self, *args, **kwargs):
        count("meet")
        return meet(self, *args, **kwargs)

    type(state).meet = met  # it has slots of its own: this process ends anyhow


def found_after(rank, size, folder, ways):
    """The weights that one process loads after each case."""
    found = []
    for number, way in enumerate(ways):
        a, model, _ = _small(f"{folder}/{number}", way)
        a.load_state(None if way == "named" else f"{folder}/{number}")
        values = torch.cat([value.flatten() for value in a.get_state_dict(model).values()])
        found.append(values.unique().tolist())
    return found


def adapters_alone(rank, size, folder):
    """A sharded PEFT model: its adapters are saved without what is frozen, and read back."""
    from peft import LoraConfig, get_peft_model

    from anydevice.utils import load_fsdp_model, save_fsdp_model

    kept = {}
    for layout in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        fresh()
        plugin = FullyShardedDataParallelPlugin(state_dict_type=layout)
        a = Accelerator(cpu=True, fsdp_plugin=plugin)
        model = get_peft_model(parts()[0], LoraConfig(r=2, target_modules=["up", "last"]))
        model = a.prepare(model)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        for parameter in trained.values():
            parameter.data.fill_(3.0)
        place = f"{folder}/{layout}"
        save_fsdp_model(plugin, a, model, place, adapter_only=True)
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        load_fsdp_model(plugin, a, model, place, adapter_only=True)
        for name, parameter in model.named_parameters():
            wanted = 3.0 if name in trained else 1.0
            assert parameter.full_tensor().unique().tolist() == [wanted], name
        with fails(CheckpointNotFoundError, "no adapters"):
            load_fsdp_model(plugin, a, model, f"{folder}/none", adapter_only=True)
        kept[layout] = sum(p.stat().st_size for p in Path(place).rglob("*") if p.is_file())
    return kept
