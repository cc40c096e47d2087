"""What the ranks of `test_distributed.py` do. Without pytest, so that they start fast."""

import contextlib
import datetime
import importlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from anydevice import interrupts
from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    MissingRankError,
    ModelError,
    OptionError,
)
from anydevice.loading import applying, distributed, load, load_checkpoint_in_model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(21, 6)
        self.norm = nn.BatchNorm1d(6)
        self.deep = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 6))
        self.head = nn.Linear(6, 21, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scalar", torch.tensor(3.0))
        self.register_buffer("empty", torch.zeros(0, 3))


def expected(folder):
    return torch.load(folder / "truth.pt")


def equal(model, truth, dtype=None):
    for name, value in model.state_dict().items():
        full = value.full_tensor() if hasattr(value, "full_tensor") else value
        want = truth[name].to(dtype) if dtype and truth[name].is_floating_point() else truth[name]
        assert full.dtype == want.dtype, name
        assert torch.equal(full, want), name


def shard(model, mesh, placements):
    """Make a model's large parameters DTensors."""

    def part(name, module, mesh):
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.dim() == 2:
                cut = distribute_tensor(parameter.detach(), mesh, placements)
                module._parameters[key] = nn.Parameter(cut)

    model = distribute_module(model, mesh, part)
    model.head.weight = model.embed.weight
    return model


def plain_broadcast(folder, rank, world):
    sent = []
    real = dist.broadcast

    def counted(tensor, *args, **kwargs):
        sent.append(tensor.nbytes)
        return real(tensor, *args, **kwargs)

    dist.broadcast = counted
    distributed._BATCH_BYTES = 256
    for dtype, device in ((None, "meta"), (None, "cpu"), (torch.bfloat16, "meta")):
        with torch.device(device):
            model = Net()
        weight = model.embed.weight
        path = folder / "model.safetensors" if rank == 0 else folder / "not here"
        report = load_checkpoint_in_model(model, path, dtype=dtype, broadcast_from_rank0=True)
        equal(model, expected(folder), dtype)
        assert model.embed.weight is weight
        assert model.head.weight is weight
        assert report.missing == []
        if rank and device == "meta" and dtype is None:
            assert backing_of(weight) is None
    dist.broadcast = real
    distributed._BATCH_BYTES = 256 << 20
    assert max(n for n in sent if n < 1000) == 21 * 6 * 4  # each tensor once, the tied one too
    load_checkpoint_in_model(Net(), path, broadcast_from_rank0=True, strict=False)


def ties_are_compared_on_rank_0(folder, rank, world):
    """With ``strict``, tied names must have the same values; only rank 0 has the values."""
    state, path = expected(folder), folder / "tied.safetensors"

    def load(change):
        if rank == 0:
            save_file({**state, "head.weight": state["embed.weight"] + change}, path)
        load_checkpoint_in_model(Net(), path, strict=True, broadcast_from_rank0=True)

    load(0)
    with raises(CheckpointError, "head.weight has other values"):
        load(1)


def odd_dtypes(folder, rank, world):
    """Types that the collectives cannot send as what they are."""
    dtypes = (torch.float8_e4m3fn, torch.uint16, torch.bool, torch.complex64, torch.bfloat16)
    state = {f"b{i}": torch.arange(6).view(2, 3).to(d) for i, d in enumerate(dtypes)}
    if rank == 0:
        save_file(state, folder / "odd.safetensors")
    model = nn.Module()
    for name, value in state.items():
        model.register_buffer(name, torch.zeros_like(value))
    load_checkpoint_in_model(model, folder / "odd.safetensors", broadcast_from_rank0=True)
    for name, value in state.items():
        bits = model.get_buffer(name).view(torch.uint8)
        assert torch.equal(bits, value.view(torch.uint8)), name


def rank_0_reads_once(folder, rank, world):
    read = []
    real = applying.stream

    def counted(requests, **options):
        read.append(sum(request.info.nbytes for request in requests))
        real(requests, **options)

    applying.stream = counted
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = Net()
        path = folder / "model.safetensors" if rank == 0 else folder / "not here"
        model = model.bfloat16()
        load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
        equal(model, expected(folder), torch.bfloat16)
    assert sum(read) == 0, read  # it takes what it sends
    applying.stream = real


def to_disk(folder, rank, world):
    path = folder / "model.safetensors" if rank == 0 else "not here"
    with torch.device("meta"):
        model = Net()
    load_checkpoint_in_model(
        model,
        path,
        device_map={"": "disk"},
        dtype=torch.float16,
        offload_folder=folder / f"offload-{rank}",
        broadcast_from_rank0=True,
    )
    equal(model, expected(folder), torch.float16)
    assert backing_of(model.embed.weight) is not None


def dtensors(folder, rank, world):
    path = folder / "model.safetensors"
    meshes = [(init_device_mesh("cpu", (world,)), [[Shard(0)], [Shard(1)], [Replicate()]])]
    if world == 4:
        two = init_device_mesh("cpu", (2, 2))
        meshes.append((two, [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)]]))
    distributed._BATCH_BYTES = 200
    for mesh, ways in meshes:
        for placements in ways:
            for broadcast in (False, True):
                for dtype in (None, torch.bfloat16) if placements is ways[0] else (None,):
                    model = shard(Net(), mesh, placements)
                    weight = model.deep[0].weight
                    load_checkpoint_in_model(
                        model,
                        path if rank == 0 or not broadcast else "not here",
                        dtype=dtype,
                        full_state_dict=broadcast,
                        broadcast_from_rank0=broadcast,
                    )
                    assert model.deep[0].weight is weight
                    assert list(weight.placements) == placements
                    equal(model, expected(folder), dtype)
                    with torch.device("meta"):
                        empty = Net()
                    empty = shard(empty, mesh, placements)
                    load_checkpoint_in_model(
                        empty,
                        path if rank == 0 or not broadcast else "x",
                        broadcast_from_rank0=broadcast,
                    )
                    equal(empty, expected(folder))
    with torch.device("meta"):
        rows = shard(Net(), meshes[0][0], [Shard(0)])
    load_checkpoint_in_model(rows, path)
    assert backing_of(rows.embed.weight.to_local()) is not None  # its own rows, mapped


def fsdp_within_tensor_parallelism(folder, rank, world):
    """The one way in which a dimension is cut twice, the later cut within the earlier."""
    if world != 4:
        return
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = Net()
        parallelize_module(
            model.deep, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()}
        )
        fully_shard(model.deep, mesh=mesh["data"])
        load_checkpoint_in_model(model, folder / "model.safetensors")
        kinds = {type(p).__name__ for p in model.deep[0].weight.placements}
        assert kinds == {"_StridedShard", "Shard"}
        equal(model, expected(folder))


def failures(folder, rank, world):
    path = folder / "model.safetensors" if rank == 0 else folder / "not here"
    truth = expected(folder)
    last = world - 1

    def refused(model, source, culprit, kind, words, reason=None, **options):
        """One rank's fault is an error on all, which name it; no model changes."""
        state = model.state_dict()
        before = {k: None if v.is_meta else v.clone() for k, v in state.items()}
        places = {k: v.data_ptr() for k, v in state.items() if not v.is_meta}
        with raises(
            kind if rank == culprit else CheckpointError,
            words if rank == culprit else f"rank {culprit} could not",
        ) as error:
            load_checkpoint_in_model(model, source, broadcast_from_rank0=True, **options)
        if rank != culprit:
            assert reason or words in str(error[0]), error[0]
            assert "unchanged" in str(error[0])
        for name, value in model.state_dict().items():
            assert value.is_meta if before[name] is None else torch.equal(value, before[name])
            assert value.is_meta or value.data_ptr() == places[name]

    # Rank 0 cannot open it; a rank's arguments are wrong; a rank's model does not fit.
    refused(Net(), folder / "nothing/at/all", 0, CheckpointNotFoundError, "nothing")
    for culprit in (0, last):
        options = {"workers": -1} if rank == culprit else {}
        refused(Net(), path, culprit, OptionError, "workers=-1", **options)
        options = {"dtype": "florp"} if rank == culprit else {}
        refused(Net(), path, culprit, ModelError, "florp", **options)
        model = Net() if rank != culprit else nn.Linear(2, 2)
        refused(model, path, culprit, CheckpointMismatchError, "does not fit")

    # Reading fails on rank 0 after some tensors.
    distributed._BATCH_BYTES = 128
    source = path
    if rank == 0:
        source = open_checkpoint(path)
        calls = []

        class Failing(type(source)):
            def tensor(self, name):
                calls.append(name)
                if len(calls) > 3:
                    raise OSError("the disk is gone")
                return super().tensor(name)

        source.__class__ = Failing
    for device in ("meta", "cpu"):
        with torch.device(device):
            model = Net().half()
        refused(model, source, 0, OSError, "the disk is gone")

    # Receiving fails on the last rank.
    def convert(tensor, target):
        raise MemoryError("no more")

    if rank == last:
        distributed.convert = convert
    refused(Net().half(), path, last, MemoryError, "no more")

    # A rank is interrupted at each step.
    importlib.reload(distributed)
    for at in ("plan_for", "read", "keep", "prepare"):
        interrupted_at(folder, path, rank, world, at)

    # And all still works after that.
    model = Net()
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    equal(model, truth)


class Stop(BaseException):
    """What a handler of a signal raises."""


def interrupted_at(folder, path, rank, world, at):
    """A signal in the middle of a step: the rank raises it as itself, the others name the rank."""

    def handle(*_):
        raise Stop("by a signal")

    signal.signal(signal.SIGUSR1, handle)
    culprit = world - 1
    owner = distributed._Receiving if at != "plan_for" else load
    name = "make_plan" if at == "plan_for" else at
    real = getattr(owner, name)

    def interrupting(*args, **kwargs):
        setattr(owner, name, real)
        os.kill(os.getpid(), signal.SIGUSR1)
        while not interrupts.stopper()():
            time.sleep(0.001)
        return real(*args, **kwargs)

    if rank == culprit:
        setattr(owner, name, interrupting)
    model = Net().half()
    before = [parameter.clone() for parameter in model.parameters()]
    with raises(Stop if rank == culprit else CheckpointError, "") as error:
        load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    if rank != culprit:
        assert f"rank {culprit} could not" in str(error[0])
        assert "interrupted" in str(error[0])
    else:
        assert error[0].args == ("by a signal",)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def never_calls(folder, rank, world):
    """The last of the cases: the ranks do not meet any more."""
    if rank == world - 1:
        time.sleep(PATIENCE.total_seconds() + 2)
        return
    begun = time.monotonic()
    with raises(MissingRankError, f"rank {world - 1} did not come within 3 s"):
        load_checkpoint_in_model(Net(), folder / "model.safetensors", broadcast_from_rank0=True)
    assert time.monotonic() - begun < 30


def dies(folder, rank, world):
    """A rank ends in the middle of sending."""

    def end(*_):
        os._exit(0)

    if rank == world - 1:
        distributed._Exchange.keep = end
    with raises((MissingRankError, CheckpointError), f"rank {world - 1} ") as error:
        load_checkpoint_in_model(Net(), folder / "model.safetensors", broadcast_from_rank0=True)
    assert "died" in str(error[0]) or "left" in str(error[0])


@contextlib.contextmanager
def raises(kind, words):
    """Like `pytest.raises`."""
    caught = []
    try:
        yield caught
    except kind as error:
        caught.append(error)
    assert caught, f"no {kind}"
    assert words in str(caught[0]), caught[0]


#: A rank that waits longer than this for another one raises an error.
PATIENCE = datetime.timedelta(seconds=60)
ORDER = (
    plain_broadcast,
    ties_are_compared_on_rank_0,
    odd_dtypes,
    rank_0_reads_once,
    to_disk,
    dtensors,
    fsdp_within_tensor_parallelism,
    failures,
)


def run_all(rank, world, folder):
    begin(rank, world)
    for case in ORDER:
        here = Path(folder) / f"{case.__name__}-{world}"
        try:
            case(here, rank, world)
        except BaseException as error:
            raise AssertionError(f"{case.__name__} on rank {rank}") from error
        dist.barrier()


def run_last(rank, world, folder, name):
    """A case after which the ranks are not together any more."""
    global PATIENCE
    PATIENCE = datetime.timedelta(seconds=3)
    begin(rank, world)
    globals()[name](Path(folder), rank, world)


def begin(rank, world):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=PATIENCE)
