"""Twins: a tensor on the executing device that stands for one that rests elsewhere.

A twin must pass for its original inside ``forward``: same class, same attributes, same
``requires_grad``. With gradients on it is differentiable, so that backward reaches the original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anydevice import registry
from anydevice.devices import Device, parse_device
from anydevice.tensors import move_tensor

__all__ = [
    "attributes_back",
    "is_lazy",
    "is_transformed",
    "make_twin",
    "moves_by_itself",
    "twins_of_data",
    "wants_gradient",
]


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no shape yet: there is nothing of it to move."""
    return bool(nn.parameter.is_lazy(tensor))


def wants_gradient(rest: torch.Tensor) -> bool:
    """Whether a backward pass must find its way from the twin to the resting tensor."""
    return rest.requires_grad and torch.is_grad_enabled()


def moves_by_itself(rest: torch.Tensor) -> bool:
    """Whether the tensor's class says how it moves (quantized weights, distributed tensors)."""
    kind = type(rest)
    if kind is nn.Parameter or kind is torch.Tensor:
        return False
    return (
        kind.to is not torch.Tensor.to
        or kind.__torch_function__ not in _PLAIN_TORCH_FUNCTIONS
        or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


_PLAIN_TORCH_FUNCTIONS = (torch.Tensor.__torch_function__, nn.Parameter.__torch_function__)


def make_twin(
    rest: torch.Tensor, device: Device, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    """Copy one tensor to ``device`` at once, on the current stream.

    Args:
        rest: the tensor that stays where it is.
        device: where the twin is.
        compute_dtype: the twin's dtype, where ``rest`` holds floating-point numbers.
    """
    if wants_gradient(rest):
        twin = _cast(move_tensor(_castable(rest, device, compute_dtype), device), compute_dtype)
        return _dress(twin, rest, device)
    with torch.no_grad():
        source = rest if moves_by_itself(rest) else rest.detach()
        data = move_tensor(_castable(source, device, compute_dtype), device)
        return _standing_for(rest, _cast(data, compute_dtype), device)


def twins_of_data(
    rests: Sequence[torch.Tensor],
    data: Mapping[int, torch.Tensor],
    device: Device,
    compute_dtype: torch.dtype | None,
) -> dict[int, torch.Tensor]:
    """Make twins of copies of the data that are on the device already.

    Args:
        rests: the tensors that stay where they are.
        data: the copies, by the index of their original.
        device: where the copies are.
        compute_dtype: the dtype of twins of floating-point numbers; None for their own.
    """
    graph = torch.is_grad_enabled()
    twins = {}
    with torch.no_grad():
        for index, copy in data.items():
            rest = rests[index]
            if not (graph and rest.requires_grad):
                twins[index] = _standing_for(rest, _cast(copy, compute_dtype), device)
    for index, copy in data.items():
        if index not in twins:
            arrived = _Arrival.apply(rests[index], copy)  # type: ignore[no-untyped-call]
            twins[index] = _dress(_cast(arrived, compute_dtype), rests[index], device)
    return twins


class _Arrival(torch.autograd.Function):
    """The data of the twin, and the graph of the resting tensor."""

    @staticmethod
    def forward(ctx: Any, rest: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.home = parse_device(rest.device)
        return data.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return move_tensor(gradient, ctx.home), None


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode AD is at work: they want torch's own operators."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return (active is not None and active()) or torch.autograd.forward_ad._current_level >= 0


def _standing_for(rest: torch.Tensor, data: torch.Tensor, device: Device) -> torch.Tensor:
    """Data as a leaf with the class and attributes of its original."""
    kind = type(rest)
    if kind is torch.Tensor or moves_by_itself(rest):
        return _dress(data, rest, device)
    gradient = rest.requires_grad and (data.is_floating_point() or data.is_complex())
    if gradient and torch.is_autocast_enabled(device.type):
        # Autocast keeps its casts of leaves that want gradients until it ends: in time, of all.
        gradient = False
    return _dress(torch.Tensor._make_subclass(kind, data, gradient), rest, device)


def _dress(twin: torch.Tensor, rest: torch.Tensor, device: Device) -> torch.Tensor:
    """Give a twin the class and attributes of its original; tensors among these come along."""
    kind = type(rest)
    if type(twin) is not kind and not moves_by_itself(rest):
        twin = twin.as_subclass(kind)  # keeps the graph
    if rest.__dict__:
        for name, value in rest.__dict__.items():
            is_tensor = isinstance(value, torch.Tensor)
            twin.__dict__[name] = move_tensor(value, device) if is_tensor else value
    return twin


def attributes_back(twin: torch.Tensor, rest: torch.Tensor, given: dict[str, Any]) -> None:
    """Attributes that forward set on a twin belong to its original."""
    for name, value in twin.__dict__.items():
        if name not in given or given[name] is not value:
            if isinstance(value, torch.Tensor) and value.device == twin.device:
                value = value.to(rest.device)
            rest.__dict__[name] = value


def _castable(
    rest: torch.Tensor, device: Device, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    """Cast before the journey only what the device cannot hold."""
    if compute_dtype is None or not rest.is_floating_point() or not device.is_accelerator:
        return rest
    if registry.get_backend(device.torch).supports_dtype(rest.dtype):
        return rest
    return rest.to(compute_dtype)


def _cast(tensor: torch.Tensor, compute_dtype: torch.dtype | None) -> torch.Tensor:
    if compute_dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(compute_dtype)
