"""One rank of `test_distributed.py`: run as a script by several processes.

usage: ranks.py FOLDER RANK WORLD
"""

import contextlib
import datetime
import importlib
import json
import os
import re
import sys
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from anydevice.checkpoint.mapped import backing_of
from anydevice.errors import CheckpointError, CheckpointMismatchError, CheckpointNotFoundError
from anydevice.loading import applying, distributed, load_checkpoint_in_model


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
    distributed.MESSAGE_BYTES = 256
    for dtype, device in ((None, "meta"), (None, "cpu"), (torch.bfloat16, "meta")):
        with torch.device(device):
            model = Net()
        weight = model.embed.weight
        path = folder / "model.safetensors" if rank == 0 else folder / "not here"
        sent.clear()
        report = load_checkpoint_in_model(model, path, dtype=dtype, broadcast_from_rank0=True)
        equal(model, expected(folder), dtype)
        assert model.embed.weight is weight
        assert model.head.weight is weight
        messages = [n for n in sent if n > 100]
        assert 0 < len(messages) < 12, sent
        assert max(messages) <= 256 + 8
        assert report.missing == []
        if rank and device == "meta" and dtype is None:
            assert backing_of(weight) is None
    distributed.MESSAGE_BYTES = 64 << 20
    sent.clear()
    load_checkpoint_in_model(Net(), path, broadcast_from_rank0=True)
    assert len([n for n in sent if n > 1000]) == 1  # all weights in one message


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
    distributed.MESSAGE_BYTES = 200
    for mesh, ways in meshes:
        for placements in ways:
            for broadcast in (False, True):
                for dtype in (None, torch.bfloat16):
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

    # Rank 0 cannot open it.
    with outcome(
        CheckpointNotFoundError if rank == 0 else CheckpointError,
        "nothing" if rank == 0 else "rank 0",
    ):
        load_checkpoint_in_model(Net(), folder / "nothing/at/all", broadcast_from_rank0=True)

    # One rank's model does not fit.
    model = Net() if rank != 1 else nn.Linear(2, 2)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with outcome(
        CheckpointMismatchError if rank == 1 else CheckpointError, "fit" if rank == 1 else "rank 1"
    ):
        load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())

    # Reading fails on rank 0 after some messages.
    distributed.MESSAGE_BYTES = 128
    with torch.device("meta"):
        model = Net()
    if rank == 0:
        from anydevice.checkpoint import open_checkpoint

        source = open_checkpoint(path)
        calls = []

        class Failing(type(source)):
            def tensor(self, name):
                calls.append(name)
                if len(calls) > 3:
                    raise OSError("the disk is gone")
                return super().tensor(name)

        source.__class__ = Failing
    else:
        source = path
    with outcome(
        OSError if rank == 0 else CheckpointError, "disk is gone" if rank == 0 else "rank 0"
    ):
        load_checkpoint_in_model(model, source, broadcast_from_rank0=True)
    assert all(p.is_meta for p in model.parameters())

    # Placing fails on the last rank.
    last = world - 1
    if rank == last:
        distributed._empty = None
    with outcome(
        CheckpointError if rank != last else TypeError,
        f"rank {last}" if rank != last else "NoneType",
    ):
        load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    assert all(p.is_meta for p in model.parameters())

    # And all still works after that.
    importlib.reload(distributed)
    load_checkpoint_in_model(model, path, broadcast_from_rank0=True)
    equal(model, truth)


@contextlib.contextmanager
def outcome(kind, words):
    with pytest.raises(kind, match=re.escape(words)):
        yield


#: A rank that waits longer than this for another is told of by an error.
PATIENCE = datetime.timedelta(seconds=60)
ORDER = (
    plain_broadcast,
    rank_0_reads_once,
    to_disk,
    dtensors,
    fsdp_within_tensor_parallelism,
    failures,
)
CASES = {f.__name__: f for f in ORDER}


def main():
    folder, rank, world = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"{world}.store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    failed = {}
    for name, case in CASES.items():
        here = folder / f"{name}-{world}"
        try:
            case(here, rank, world)
        except BaseException:  # noqa: BLE001 - reported, whatever it is
            failed[name] = traceback.format_exc()
            break  # the other ranks may be elsewhere now
        dist.barrier()
    print(json.dumps({"rank": rank, "failed": failed}))
    sys.stdout.flush()
    os._exit(bool(failed))  # a group with a failed rank cannot be taken down in order


if __name__ == "__main__":
    main()
