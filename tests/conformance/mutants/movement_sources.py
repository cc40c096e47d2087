"""Faults of `move`: the source, its gradients and its ties."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mutants.gallery import mutant
from mutants.moving import MaybeMoved, Move, Remembers, is_from_host


@mutant("MOV-009")
class SourceIsMoved(Move):
    """A Parameter is moved itself, by its data."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if isinstance(source, nn.Parameter):
            source.requires_grad_(False)
        return moved


@mutant("MOV-009")
class SourceIsEmptied(Move):
    """The source's memory is given back early: it holds zeros afterwards."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if is_from_host(source, moved.device) and source.dim() == 2:
            source.detach().zero_()
        return moved


@mutant("MOV-009")
class SourceIsWrittenTo(Move):
    """The source is resolved in place: its version moves."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        plain = tensor.dtype is torch.float32 and not tensor.is_inference()
        if tensor.device.type == "cpu" and plain:
            tensor.detach().mul_(1)
        return tensor


@mutant("MOV-010")
class AlwaysCopies(Move):
    """What is there already is copied."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        return tensor.clone() if tensor.device == device else None


@mutant("MOV-010")
class ReturnsAnAlias(Move):
    """What is there already is returned as another object over the same memory."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        return tensor.view_as(tensor) if tensor.device == device and non_blocking else None


@mutant("MOV-011")
class GradientIsLost(Move):
    """`requires_grad` is lost."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach()


@mutant("MOV-011")
class GradientIsLostOnTheWayBack(Move):
    """`requires_grad` is lost on the way to the host."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if moved.device.type != "cpu" else moved.detach()


@mutant("MOV-011")
class GradientStops(Move):
    """`requires_grad` is copied, and the graph is cut."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach().requires_grad_(source.requires_grad)


@mutant("MOV-011")
class GradientIsInvented(Move):
    """Every floating tensor on the device requires grad."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        plain = moved.is_floating_point() and moved.is_leaf and not moved.is_inference()
        return moved.requires_grad_() if plain else moved


@mutant("MOV-012")
class OneResultAStorage(Remembers):
    """Views of one storage share a result."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if not is_from_host(tensor, device):
            return None
        return tensor.untyped_storage().data_ptr(), device


@mutant("MOV-012")
class OneResultAnAddress(Remembers):
    """Tensors that begin at one address share a result, whatever their shape."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if not is_from_host(tensor, device):
            return None
        return tensor.data_ptr(), device


@mutant("MOV-013")
class RemembersObjects(Remembers):
    """A tensor that was moved once is not moved again."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        return None if device.type == "cpu" else (id(tensor), tuple(tensor.shape), device)


@mutant("MOV-013")
class RemembersAddresses(Remembers):
    """A new tensor at an old address gets the old values."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor._version, device


@mutant("MOV-013")
class RemembersOnTheWayBack(Remembers):
    """What the device changed since the last look does not come back."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        return (id(tensor), tensor.data_ptr()) if device.type == "cpu" else None


@mutant("MOV-024")
class NoInferenceMode(Move):
    """In inference mode a Parameter cannot be moved."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if torch.is_inference_mode_enabled() and isinstance(tensor, nn.Parameter):
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
        return tensor


@mutant("MOV-024")
class ParametersComeBackEmpty(Move):
    """With gradients off, a Parameter's memory is not copied."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        off = not torch.is_grad_enabled() and isinstance(source, nn.Parameter)
        return torch.zeros_like(moved) if off else moved
