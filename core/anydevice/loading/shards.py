"""DTensors: which part of a full weight belongs to this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from anydevice.checkpoint.info import TensorInfo
from anydevice.devices import CPU, Device, parse_device
from anydevice.errors import ModelError
from anydevice.tensors import is_sharded

__all__ = [
    "Part",
    "cut",
    "info_of_part",
    "keep_current_devices",
    "mesh_device",
    "own_part",
    "put_local",
]

T = TypeVar("T")
#: Start and length in each dimension of the full tensor.
Part = tuple[tuple[int, int], ...]


def own_part(name: str, tensor: Any) -> Part:
    """The part of a DTensor that this process holds.

    Raises:
        ModelError: its placements are other than Replicate and Shard.
    """
    mesh, shape = tensor.device_mesh, tensor.shape
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in shape)
    part = [(0, size) for size in shape]
    # A strided shard cuts what the plain ones left: so does FSDP within tensor parallelism.
    for cutting in ("Shard", "_StridedShard"):
        for index, placement in enumerate(tensor.placements):
            if type(placement).__name__ == cutting:
                dim = placement.dim % len(shape)
                part[dim] = _chunk(part[dim], mesh.size(index), coordinate[index])
    local = tuple(length for _, length in part)
    if local != tuple(tensor.to_local().shape) or any(p.is_partial() for p in tensor.placements):
        raise ModelError(
            f"{name} is a DTensor with placements {tensor.placements}, whose part of a full "
            "weight is undefined: distribute it by Shard and Replicate"
        )
    return tuple(part)


def _chunk(whole: tuple[int, int], count: int, index: int) -> tuple[int, int]:
    """The ``index``-th of ``count`` chunks, as `torch.chunk` makes them."""
    start, length = whole
    size = -(-length // count)
    before = min(index * size, length)
    return start + before, min(size, length - before)


def cut(full: torch.Tensor, part: Part) -> torch.Tensor:
    """The part of a full tensor, as a view."""
    for dim, (start, length) in enumerate(part):
        full = full.narrow(dim, start, length)
    return full


def info_of_part(info: TensorInfo, part: Part) -> TensorInfo:
    """What the file has for a part: a range of bytes where only rows are cut, else no one range."""
    shape = tuple(length for _, length in part)
    count = torch.Size(shape).numel()
    nbytes = count * info.dtype.itemsize
    offset = None
    if info.offset is not None and shape[1:] == info.shape[1:]:
        row = torch.Size(shape[1:]).numel() * info.dtype.itemsize
        offset = info.offset + (part[0][0] if part else 0) * row
    return TensorInfo(info.dtype, shape, nbytes, info.file, offset)


def mesh_device(tensor: Any) -> Device:
    """The device of this process in a DTensor's mesh."""
    kind = str(tensor.device_mesh.device_type)
    if kind == CPU.type:
        return CPU
    if tensor.device.type == kind:
        return parse_device(tensor.device)
    module: Any = torch.get_device_module(kind)
    return Device(kind, int(module.current_device()))


def keep_current_devices(model: nn.Module, function: Callable[[], T]) -> Callable[[], T]:
    """Have a function that another thread calls see this thread's current devices.

    They say which device of a mesh is this process's, and are each thread's own.
    """
    parameters: list[Any] = list(model.parameters())
    kinds = {str(p.device_mesh.device_type) for p in parameters if is_sharded(p)}
    modules: list[Any] = [torch.get_device_module(kind) for kind in kinds - {CPU.type}]
    current = [int(module.current_device()) for module in modules]

    def call() -> T:
        for module, index in zip(modules, current, strict=True):
            module.set_device(index)
        return function()

    return call


def put_local(owner: dict[str, Any], name: str, value: torch.Tensor) -> None:
    """Let the DTensor under ``name`` hold ``value`` as this process's part."""
    old = owner[name]
    local = old.to_local()
    if not local.is_meta and local.dtype == value.dtype and local.device == value.device:
        with torch.no_grad():
            local.detach().copy_(value)
        return
    from torch.distributed.tensor import DTensor

    new: torch.Tensor = DTensor.from_local(
        value,
        old.device_mesh,
        old.placements,
        run_check=False,
        shape=old.shape,
        stride=old.stride(),
    )
    if isinstance(old, nn.Parameter):
        requires_grad = old.requires_grad and value.is_floating_point()
        new = nn.Parameter(new, requires_grad=requires_grad)
        new.__dict__.update(old.__dict__)
        torch.utils.swap_tensors(old, new)  # type: ignore[no-untyped-call]
    else:
        owner[name] = new
