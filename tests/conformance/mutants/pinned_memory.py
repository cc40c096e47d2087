"""Faults of pinned memory."""

from __future__ import annotations

from typing import Any

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import Elsewhere, MaybeMoved, Move, is_to_host


@mutant("PIN-001")
class NotPinned(Fault):
    """`pin_memory` gives an ordinary copy."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


@mutant("PIN-001")
class NotCopied(Fault):
    """`pin_memory` gives the tensor back."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@mutant("PIN-001")
class PinnedAsFloat(Fault):
    """Pinned memory has another shape: a staging buffer's."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().pin_memory(tensor).reshape(-1)


@mutant("PIN-002")
class OriginalIsGivenUp(Fault):
    """The original's memory is used for something else afterwards."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        pinned = super().pin_memory(tensor)
        if tensor.is_floating_point() and not tensor.is_pinned():
            tensor.zero_()
        return pinned


@mutant("PIN-002")
class PinsOnce(Fault):
    """A tensor that was pinned once is not pinned again: what changed since is missed."""

    def __init__(self) -> None:
        self.known: dict[int, torch.Tensor] = {}

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.known.setdefault(tensor.data_ptr(), super().pin_memory(tensor))


@mutant("PIN-003")
class PinnedCopiesBlock(Move):
    """`non_blocking` is not passed on."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        return self.rightly(tensor, device)


@mutant("PIN-004")
class OneStagingBuffer(Fault):
    """All pinned tensors of one size share one buffer, which is written again at once."""

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.shape, tensor.dtype)
        if key not in self.buffers:
            self.buffers[key] = super().pin_memory(tensor)
        self.buffers[key].copy_(tensor)
        return self.buffers[key].view_as(tensor)


@mutant("PIN-005")
class EmptyCannotBePinned(Fault):
    """0 bytes cannot be locked."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() == 0:
            raise RuntimeError("invalid argument: size 0")
        return super().pin_memory(tensor)


@mutant("PIN-005")
class PinsTheFirstBytes(Fault):
    """A view is pinned as if it were contiguous."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 2 and not tensor.is_contiguous():
            tensor = torch.as_strided(tensor, tensor.shape, (tensor.shape[1], 1))
        return super().pin_memory(tensor)


@mutant("PIN-005")
class PinsNoFloat64(Fault):
    """float64 is pinned as float32."""

    def pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().pin_memory(tensor.float() if tensor.dtype is torch.float64 else tensor)


@mutant("PIN-006")
class FetchedElsewhere(Elsewhere):
    """A non-blocking copy to the host runs on a hidden stream."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return non_blocking and is_to_host(tensor, device)
