"""Device copies: a tensor on the executing device that stands for one elsewhere.

A copy must pass for its original inside ``forward``: same class, same attributes, same
``requires_grad``. With gradients on it is differentiable, so that backward reaches the original.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anydevice import registry
from anydevice.devices import Device, parse_device
from anydevice.tensors import PLAIN_TYPES, move_tensor

__all__ = [
    "attributes_back",
    "copies_of_data",
    "copy_values",
    "is_lazy",
    "is_transformed",
    "make_device_copy",
    "moves_by_itself",
    "pass_gradient_on",
]


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no shape yet: there is nothing of it to move."""
    return bool(nn.parameter.is_lazy(tensor))


def moves_by_itself(original: torch.Tensor) -> bool:
    """Whether the tensor's class says how it moves (quantized weights, distributed tensors)."""
    kind = type(original)
    if kind is nn.Parameter or kind is torch.Tensor:
        return False
    return (
        kind.to is not torch.Tensor.to
        or kind.__torch_function__ not in _PLAIN_TORCH_FUNCTIONS
        or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    )


_PLAIN_TORCH_FUNCTIONS = (torch.Tensor.__torch_function__, nn.Parameter.__torch_function__)


def make_device_copy(
    original: torch.Tensor, device: Device, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    """Copy one tensor to ``device`` at once, on the current stream.

    ``compute_dtype`` is the copy's dtype, where ``original`` holds floating-point numbers.
    """
    if original.requires_grad and torch.is_grad_enabled():
        copy = _cast(move_tensor(_castable(original, device, compute_dtype), device), compute_dtype)
        return _dress(copy, original, device)
    with torch.no_grad():
        source = original if moves_by_itself(original) else original.detach()
        data = move_tensor(_castable(source, device, compute_dtype), device)
        return _standing_for(original, _cast(data, compute_dtype), device)


def copy_values(original: torch.Tensor, device: Device, dtype: torch.dtype) -> torch.Tensor:
    """Copy a tensor's values to ``device`` in a dtype, on the current stream; the host waits."""
    return move_tensor(_castable(original, device, dtype), device).to(dtype)


def copies_of_data(
    originals: Sequence[torch.Tensor],
    data: Mapping[int, torch.Tensor],
    device: Device,
    compute_dtype: torch.dtype | None,
) -> dict[int, torch.Tensor]:
    """Make device copies of data that is on the device already, by the index of the original.

    ``compute_dtype`` is the dtype of copies of floating-point numbers; None for their own.
    """
    graph = torch.is_grad_enabled()
    copies = {}
    with torch.no_grad():
        for index, copy in data.items():
            original = originals[index]
            if not (graph and original.requires_grad):
                copies[index] = _standing_for(original, _cast(copy, compute_dtype), device)
    for index, copy in data.items():
        if index not in copies:
            arrived = _Arrival.apply(originals[index], copy)  # type: ignore[no-untyped-call]
            copies[index] = _dress(_cast(arrived, compute_dtype), originals[index], device)
    return copies


class _Arrival(torch.autograd.Function):
    """The data of the copy, and the graph of the original."""

    @staticmethod
    def forward(ctx: Any, original: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        ctx.home = parse_device(original.device)
        return data.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return move_tensor(gradient, ctx.home), None


def is_transformed() -> bool:
    """Whether `torch.func` or forward-mode AD is at work: they need torch's own operators."""
    active = getattr(torch._C, "_are_functorch_transforms_active", None)
    return (active is not None and active()) or torch.autograd.forward_ad._current_level >= 0


def _standing_for(original: torch.Tensor, data: torch.Tensor, device: Device) -> torch.Tensor:
    """Data as a leaf with the class and attributes of its original."""
    kind = type(original)
    if kind is torch.Tensor or moves_by_itself(original):
        return _dress(data, original, device)
    gradient = original.requires_grad and (data.is_floating_point() or data.is_complex())
    if gradient and torch.is_autocast_enabled(device.type):
        # Autocast keeps its casts of leaves that want gradients, of all layers, until it ends.
        gradient = False
    return _dress(torch.Tensor._make_subclass(kind, data, gradient), original, device)


def _dress(copy: torch.Tensor, original: torch.Tensor, device: Device) -> torch.Tensor:
    """Give a copy the class and attributes of its original; tensors among these come along."""
    kind = type(original)
    if type(copy) is not kind and (type(copy) in PLAIN_TYPES or not moves_by_itself(original)):
        copy = copy.as_subclass(kind)  # keeps the graph
    if original.__dict__:
        for name, value in original.__dict__.items():
            is_tensor = isinstance(value, torch.Tensor)
            copy.__dict__[name] = move_tensor(value, device) if is_tensor else value
    return copy


def attributes_back(copy: torch.Tensor, original: torch.Tensor, given: dict[str, Any]) -> None:
    """Attributes that forward set on a copy belong to its original."""
    for name, value in copy.__dict__.items():
        if name not in given or given[name] is not value:
            if isinstance(value, torch.Tensor) and value.device == copy.device:
                value = value.to(original.device)
            original.__dict__[name] = value


def pass_gradient_on(copy: torch.Tensor, original: torch.Tensor) -> None:
    """Pass gradients of a copy that was made without a graph to its original, now and later.

    A call under `torch.no_grad` makes such copies. There may still be gradients for them: of a
    forward that enables gradients inside, or of another thread that has used the same copies.

    Args:
        copy: a leaf that requires gradients.
        original: the tensor that it stands for; a leaf too.
    """
    if not original.is_leaf or not original.requires_grad:
        return

    def pass_on(copy: torch.Tensor) -> None:
        gradient, copy.grad = copy.grad, None
        if gradient is not None:
            home = parse_device(original.device)
            original.backward(move_tensor(gradient.detach(), home).to(original.dtype))  # type: ignore[no-untyped-call]

    if copy.grad is not None:
        pass_on(copy)
    if copy._use_count() > 1:  # type: ignore[attr-defined] # a graph holds it
        register: Any = copy.register_post_accumulate_grad_hook
        register(pass_on)


def _castable(
    original: torch.Tensor, device: Device, compute_dtype: torch.dtype | None
) -> torch.Tensor:
    """Cast before the copy only what the device cannot hold."""
    if compute_dtype is None or not original.is_floating_point() or not device.is_accelerator:
        return original
    if registry.get_backend(device.torch).supports_dtype(original.dtype):
        return original
    return original.to(compute_dtype)


def _cast(tensor: torch.Tensor, compute_dtype: torch.dtype | None) -> torch.Tensor:
    if compute_dtype is None or not tensor.is_floating_point():
        return tensor
    return tensor.to(compute_dtype)
