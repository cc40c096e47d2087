"""Moving tensors, by themselves and inside nested data."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from anydevice import registry
from anydevice.devices import CPU, Device, DeviceLike, parse_device
from anydevice.nested import map_tensors

__all__ = [
    "PLAIN_TYPES",
    "is_dense",
    "is_sharded",
    "memory_of",
    "move_tensor",
    "send_to_device",
    "storage_address",
]

#: Types whose instances are no other kind of tensor: neither made of others, nor without a shape.
PLAIN_TYPES = (torch.nn.Parameter, torch.Tensor)


def storage_address(tensor: torch.Tensor) -> int | None:
    """The address of a tensor's storage, on meta too; None where a storage says nothing."""
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "__tensor_flatten__"):
        return None  # made of inner tensors: the outer storage means nothing
    try:
        return _address(tensor)
    except (NotImplementedError, RuntimeError, ValueError):  # opaque, sparse, not yet shaped
        return None


def _address_of_wrapper(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


#: Without it, a Python object is made for each storage, which costs ten times as much.
_address: Callable[[torch.Tensor], int] = getattr(torch._C, "_storage_address", _address_of_wrapper)


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's memory as bytes. Valid as long as the tensor lives."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


def move_tensor(
    tensor: torch.Tensor, device: Device, *, non_blocking: bool = False
) -> torch.Tensor:
    """Return ``tensor`` on ``device`` (any device or the host), by the backend of the accelerator.

    Between two types of accelerator the copy goes through the host. So it does for tensors of
    `torch.func`, since torch's backward cannot hand them from one accelerator to another.
    Differentiable.

    Raises:
        BackendError, UnknownDeviceError: a device's backend is broken, or there is none.
        RuntimeError: the device has no memory for it.
    """
    target = device.torch
    source = tensor.device
    if source == target:
        return tensor
    if target.type == "meta":
        return tensor.to(target)
    host = CPU.type
    by_host = source.type != target.type or is_functorch_wrapped_tensor(tensor)
    if source.type != host and target.type != host and by_host:
        tensor = registry.get_backend(source).move(tensor, torch.device(host))
        source = tensor.device
    backend = registry.get_backend(source if target.type == host else target)
    return backend.move(tensor, target, non_blocking=non_blocking)


def send_to_device(
    tensor: Any,
    device: DeviceLike,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Send a tensor, or all tensors in nested data, to a device.

    Args:
        tensor: a tensor; a list, tuple, namedtuple, set, mapping, dataclass or object with a ``to``
            method; nested to any depth. Anything else is returned as it is.
        device: any spelling of a device.
        non_blocking: queue the copies where the device can; the caller orders them.
        skip_keys: keys of mappings whose values stay where they are, at any depth.

    Returns:
        The same data on ``device``. What holds nothing to move is the same object as before.

    Example:
        >>> import torch
        >>> from anydevice.utils import send_to_device
        >>> send_to_device({"x": torch.ones(2), "name": "a"}, "cpu")
        {'x': tensor([1., 1.]), 'name': 'a'}
    """
    place = parse_device(device)
    skip = frozenset([skip_keys] if isinstance(skip_keys, str) else skip_keys or ())

    def move(item: torch.Tensor) -> torch.Tensor:
        return move_tensor(item, place, non_blocking=non_blocking)

    return map_tensors(move, tensor, skip, place)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements fill one range of memory, each once, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, without importing torch's module for them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")
