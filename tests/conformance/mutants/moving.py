"""Bases of the faults that show in `move`."""

from __future__ import annotations

from typing import Any

import torch

from mutants.gallery import Fault

__all__ = ["Elsewhere", "MaybeMoved", "Move", "Remembers", "is_from_host", "is_to_host"]

#: What stands in for the right move; None where the move is right.
MaybeMoved = torch.Tensor | None


def is_to_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a move goes from a device to the host."""
    return tensor.device.type != "cpu" and device.type == "cpu"


def is_from_host(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a move goes from the host to a device."""
    return tensor.device.type == "cpu" and device.type != "cpu"


class Move(Fault):
    """A move that is wrong in what goes in, in what comes out, or altogether."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Change what is moved."""
        return tensor

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Change what was moved."""
        return moved

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        """Do it in another way; None to leave it as it is."""
        return None

    def rightly(
        self, tensor: torch.Tensor, device: torch.device, non_blocking: bool = False
    ) -> torch.Tensor:
        """The right move, for `instead`."""
        return super().move(tensor, device, non_blocking=non_blocking)

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        found = self.instead(tensor, device, non_blocking)
        if found is not None:
            return found
        if tensor.device == device:
            return tensor
        moved = self.rightly(self.before(tensor, device), device, non_blocking)
        return self.after(moved, tensor)


class Remembers(Move):
    """Keeps results and gives them again."""

    def __init__(self) -> None:
        self.results: dict[Any, torch.Tensor] = {}

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        """By what a result is found again; None for not at all."""
        raise NotImplementedError

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        key = self.key(tensor, device)
        if key is not None and key not in self.results:
            self.results[key] = self.rightly(tensor, device, non_blocking)
        return self.results.get(key)


class Elsewhere(Move):
    """Copies on a stream that nobody waits for."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        """Whether this move is one of those."""
        raise NotImplementedError

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if not self.wrong(tensor, device, non_blocking) or tensor.numel() == 0:
            return None
        mine = tensor.device if tensor.device.type == self.device_type else device
        with torch.Stream(device=torch.device(self.device_type, mine.index or 0)):
            return self.rightly(tensor, device, non_blocking)
