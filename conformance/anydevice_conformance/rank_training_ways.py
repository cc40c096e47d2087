"""The ways in which ranks train together: each must leave what one process leaves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["DISTRIBUTED", "SHARDED", "accumulated", "redistributed", "starts_apart"]

#: Name to the options of `DistributedDataParallel`: small buckets mean several collectives at once.
DISTRIBUTED: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "many buckets that gradients are views of": {
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": 1e-4,
    },
    "static": {"static_graph": True, "bucket_cap_mb": 1e-4},
    "unused parameters": {"find_unused_parameters": True},
    "accumulated": {},
}


def _by_columns(parameter: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(1) if parameter.dim() > 1 else None


#: Name to the options of `fully_shard`.
SHARDED: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "kept after forward": {"reshard_after_forward": False},
    "by columns": {"shard_placement_fn": _by_columns},
    "accumulated": {},
}


def starts_apart(model: nn.Module, rank: int) -> nn.Module:
    """The model with parameters and a buffer that are other ones on each rank but the first."""
    model.register_buffer(
        "count", torch.full((3,), float(rank), device=next(model.parameters()).device)
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank)
    return model


@contextlib.contextmanager
def _alone(model: Any) -> Iterator[None]:
    """Gradients stay on this rank."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def accumulated(model: Any, batch: torch.Tensor, loss: Callable[[Any, Any], torch.Tensor]) -> None:
    """The gradients of a batch in two halves, of which the ranks add up the second one's."""
    first, second = batch.chunk(2)
    with _alone(model):
        torch.autograd.backward(loss(model, first) / 2)
    torch.autograd.backward(loss(model, second) / 2)


def redistributed(device: torch.device) -> str:
    """Have tensors spread over the ranks be spread otherwise; what went wrong, or nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for shape in ((4, 6), (5, 7), (1, 3)):
        whole = torch.arange(1.0, 1 + shape[0] * shape[1]).view(shape)
        rows = distribute_tensor(whole.to(device), mesh, [Shard(0)])
        each = whole.to(device) / dist.get_world_size()
        part = DTensor.from_local(each, mesh, [Partial()])
        ways = {
            "rows": rows,
            "columns": rows.redistribute(mesh, [Shard(1)]),
            "rows again": rows.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Shard(0)]),
            "everywhere": rows.redistribute(mesh, [Replicate()]),
            "summed": part.redistribute(mesh, [Shard(1)]),
        }
        for name, one in ways.items():
            found = one.full_tensor().cpu()
            if not torch.equal(found, whole):
                return f"a tensor of {shape} that is spread by {name} is {found.tolist()}"
    return ""
