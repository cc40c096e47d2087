"""What the ranks of the checks of training do: small models, compared with one process."""

from __future__ import annotations

import copy
import math
import tempfile
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from anydevice_conformance.rank_training_ways import (
    DISTRIBUTED,
    SHARDED,
    accumulated,
    redistributed,
    starts_apart,
)

__all__ = ["checkpoint", "ddp", "resumed", "sharded"]

_EACH: Final = 4
_STEPS: Final = 3


def ddp(backend: Any, device: torch.device, rank: int, world: int) -> float:
    """Train by `DistributedDataParallel` in each way; the largest difference from one process."""
    ids = None if device.index is None else [device.index]
    found = []
    for name, options in DISTRIBUTED.items():
        model: Any = _model().to(device)
        if name == "plain":
            model = starts_apart(model, rank)
        if name == "unused parameters":
            model.add_module("unused", _Unused().to(device))
        model = nn.parallel.DistributedDataParallel(model, device_ids=ids, **options)
        _train(model, _batch(rank, device), name == "accumulated")
        found.append(_difference(model.module.state_dict(), world))
        if name == "plain" and bool(model.module.count.cpu().any()):
            return math.inf  # buffers are rank 0's
    return max(found)


class _Unused(nn.Module):
    """Parameters that the output does not depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def sharded(backend: Any, device: torch.device, rank: int, world: int) -> float | list[str]:
    """Train by `fully_shard` in each way; the largest difference from one process."""
    wrong = redistributed(device)
    if wrong:
        return [wrong]
    found = []
    for name, options in SHARDED.items():
        model = _sharded(device, **options)
        _train(model, _batch(rank, device), name == "accumulated")
        found.append(_difference(_full(model), world))
    return max(found)


def checkpoint(backend: Any, device: torch.device, rank: int, world: int) -> list[str]:
    """Save a sharded model, load it into a plain one; the weights that differ."""
    import torch.distributed.checkpoint

    dcp: Any = torch.distributed.checkpoint
    model = _sharded(device)
    _train(model, _batch(rank, device))
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder[0])
    plain = _model()
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=folder[0])
    plain.load_state_dict(state["model"])
    return _differing(_full(model), plain.state_dict())


def resumed(backend: Any, device: torch.device, rank: int, world: int) -> list[str]:
    """Step, save, load into new objects, step: the weights that differ from not having stopped."""
    straight, straight_optimizer = _adam(device)
    stopped, stopped_optimizer = _adam(device)
    batch = _batch(rank, device)
    for model, optimizer in ((straight, straight_optimizer), (stopped, stopped_optimizer)):
        _step(model, optimizer, batch)
    saved = copy.deepcopy([stopped.state_dict(), stopped_optimizer.state_dict()])
    with tempfile.TemporaryFile() as file:
        torch.save(saved, file)
        file.seek(0)
        loaded = torch.load(file, map_location="cpu")
    again, again_optimizer = _adam(device)
    again.load_state_dict(loaded[0])
    again_optimizer.load_state_dict(loaded[1])
    for model, optimizer in ((straight, straight_optimizer), (again, again_optimizer)):
        _step(model, optimizer, batch)
    return _differing(straight.state_dict(), again.state_dict())


def _model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def _adam(device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.parallel.DistributedDataParallel(
        _model().to(device), device_ids=None if device.index is None else [device.index]
    )
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def _sharded(device: torch.device, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in (model[0], model[2]):  # type: ignore[index]
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def _batch(rank: int, device: torch.device) -> torch.Tensor:
    return _samples()[_EACH * rank : _EACH * (rank + 1)].to(device)


def _samples() -> torch.Tensor:
    count = _EACH * dist.get_world_size()
    return torch.linspace(-1, 1, 6 * count).reshape(count, 6)


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    return loss


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor, halves: bool = False
) -> None:
    optimizer.zero_grad()
    if halves:
        accumulated(model, batch, _loss)
    else:
        torch.autograd.backward(_loss(model, batch))
    optimizer.step()


def _train(model: nn.Module, batch: torch.Tensor, halves: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(_STEPS):
        _step(model, optimizer, batch, halves)


def _full(model: nn.Module) -> dict[str, Any]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def _difference(state: dict[str, Any], world: int) -> float:
    alone = _model()
    _train(alone, _samples())
    differences: list[float] = [
        (state[name].detach().cpu() - value).abs().max().item()
        for name, value in alone.state_dict().items()
    ]
    return max(differences)


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())]
