"""What each rank does in the tests of the simulator's collectives."""

import os

import torch
import torch.distributed as dist
from torch import nn

from anydevice.errors import ProcessGroupError
from anydevice.processes import PartialState
from anydevice_conformance import simulator


def every_kind(rank, size):
    """Each collective of torch.distributed, on device tensors."""
    device = PartialState().device
    found = {"config": str(dist.get_backend_config())}

    def full(value, *shape):
        return torch.full(shape or (2,), float(value), device=device)

    gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    tensor = full(rank + 1)
    dist.all_reduce(tensor)
    found["all_reduce"] = tensor.tolist()
    for name in ("MAX", "MIN", "PRODUCT", "AVG"):
        tensor = full(rank + 1)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, name))
        found[name] = tensor[0].item()
    whole = torch.empty(2 * size, device=device)
    gather_into(whole, full(rank))
    found["gather_into"] = whole.tolist()
    part = torch.empty(2, device=device)
    scatter_into(part, torch.arange(2.0 * size, device=device))
    found["reduce_scatter"] = part.tolist()
    parts = [full(10 * rank + r) for r in range(size)]
    dist.reduce_scatter(part, parts)
    found["reduce_scatter list"] = part.tolist()
    flags = torch.tensor([rank == 0, True], device=device)
    dist.broadcast(flags, src=size - 1)
    found["broadcast"] = flags.tolist()
    tensor = full(rank + 1)
    dist.reduce(tensor, dst=1)
    found["reduce"] = tensor.tolist()
    pieces = [full(0) for _ in range(size)] if rank == 0 else None
    dist.gather(full(rank), pieces, dst=0)
    found["gather"] = pieces and [piece.tolist() for piece in pieces]
    dist.scatter(part, [full(r) for r in range(size)] if rank == 0 else None, src=0)
    found["scatter"] = part.tolist()
    mixed = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_to_all_single(mixed, torch.arange(size, device=device) + 10 * rank)
    found["all_to_all"] = mixed.tolist()
    outputs = [torch.empty(r + 1, device=device) for r in range(size)]
    dist.all_to_all(outputs, [full(r, rank + 1) for r in range(size)])
    found["all_to_all list"] = [output.tolist() for output in outputs]
    if rank == 0:
        dist.send(full(7), dst=1)
        dist.send(full(8), dst=1)
    elif rank == 1:
        dist.recv(part, src=0)
        found["recv"] = part.tolist()
        found["sender"] = dist.recv(part)
    empty = torch.empty(0, 3, device=device)
    dist.all_reduce(empty)
    dist.barrier()
    pair = dist.new_group([0, 1])
    if rank < 2:
        tensor = full(1)
        dist.all_reduce(tensor, group=pair)
        found["pair"] = tensor[0].item()
    return found


def streams(rank, size):
    """When a result is there: not before somebody waits, and then in order."""
    device = PartialState().device
    found = {}
    tensor = torch.full((4,), 1.0, device=device)
    work = dist.all_reduce(tensor, async_op=True)
    side = torch.Stream(device)
    with side:  # nobody waited on this stream: what is read is what was there
        early = tensor.clone()
    side.synchronize()
    found["without waiting"] = early.tolist()
    before = simulator.counters(device.index)["host_syncs"]
    work.wait()
    doubled = tensor * 2
    found["host waited"] = simulator.counters(device.index)["host_syncs"] - before
    found["after waiting"] = doubled.tolist()
    queued = torch.eye(32, device=device)
    for _ in range(20):
        queued = queued @ torch.eye(32, device=device)
    dist.all_reduce(queued)
    found["after queued work"] = (queued * 2).sum().item()
    with simulator.trace() as records:
        dist.all_reduce(torch.ones(256, device=device))
    found["trace"] = [(r.kind, r.bytes) for r in records if r.kind == "collective"]
    future = dist.all_reduce(torch.ones(2, device=device), async_op=True).get_future()
    found["future"] = future.then(lambda f: f.value()[0] + 1).wait().tolist()
    return found


def breaks(rank, size):
    """A rank that dies in a collective: an error where the others next wait."""
    state = PartialState()
    device = state.device
    dist.all_reduce(torch.ones(1, device=device))
    torch.sim.synchronize()
    state.wait_for_everyone()
    if rank == 1:
        os._exit(1)
    try:
        with state.collective("all_reduce"):
            tensor = torch.ones(1, device=device)
            dist.all_reduce(tensor)
            tensor.tolist()
    except ProcessGroupError as error:
        return str(error)
    return "no error"


def mixes(rank, size):
    """Tensors of two devices in one collective."""
    device = PartialState().device
    other = torch.device("sim", (device.index + 1) % torch.sim.device_count())
    try:
        dist.all_gather(
            [torch.ones(1, device=other) for _ in range(size)], torch.ones(1, device=device)
        )
    except (RuntimeError, ValueError) as error:
        return str(error)
    return "no error"


def trains(rank, size):
    """DDP and fully_shard against one process; the largest differences of parameters."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    device = PartialState().device
    samples = torch.linspace(-1, 1, 8 * 4 * size).reshape(4 * size, 8)
    mine = samples[4 * rank : 4 * (rank + 1)].to(device)
    plain = steps(model(), samples)
    wrapped = DistributedDataParallel(model().to(device), device_ids=[device.index])
    steps(wrapped, mine)
    sharded = model().to(device)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer)
    steps(fully_shard(sharded), mine)
    full = {name: value.full_tensor() for name, value in sharded.state_dict().items()}
    return [
        max((state[n].cpu() - value).abs().max().item() for n, value in plain.state_dict().items())
        for state in (wrapped.module.state_dict(), full)
    ]


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def steps(net, samples):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        net(samples).square().mean().backward()
        optimizer.step()
    return net
