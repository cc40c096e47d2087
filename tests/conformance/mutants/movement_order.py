"""Faults of `move`: order, waiting and threads."""

from __future__ import annotations

import os
import threading
import time

import torch

from mutants.gallery import Fault, mutant
from mutants.moving import (
    Elsewhere,
    MaybeMoved,
    Move,
    is_from_host,
    is_to_host,
)


@mutant("MOV-014")
class QueuedElsewhere(Elsewhere):
    """A non-blocking copy to the device runs on a hidden stream that is never waited for."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return non_blocking and is_from_host(tensor, device)


@mutant("MOV-014")
class PinnedQueuedElsewhere(Elsewhere):
    """Only copies from pinned memory run on the hidden stream."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return non_blocking and is_from_host(tensor, device) and tensor.is_pinned()


@mutant("MOV-015")
class NeverBlocks(Move):
    """A move to the host is always queued only."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        return self.rightly(tensor, device, True) if device.type == "cpu" else None


@mutant("MOV-015")
class ReadsEarly(Elsewhere):
    """A move to the host does not wait for the kernels before it."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return is_to_host(tensor, device) and not non_blocking


@mutant("MOV-016")
class SynchronizeDoesNothing(Fault):
    """`synchronize` returns at once."""

    def synchronize(self, index: int) -> None:
        """Do nothing."""


@mutant("MOV-016")
class SynchronizesTheFirst(Fault):
    """`synchronize` waits for device 0, whatever its index."""

    def synchronize(self, index: int) -> None:
        super().synchronize(0)


@mutant("MOV-019")
class SharedStaging(Move):
    """All threads copy through one staging buffer."""

    staged: torch.Tensor | None = None

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return tensor
        self.staged = tensor
        time.sleep(0.0005)
        return self.staged


@mutant("MOV-019")
class RefusesThreads(Move):
    """The runtime belongs to the thread that used it first."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if threading.get_ident() != self.owner:
            raise RuntimeError("context is bound to another thread")
        return tensor


@mutant("MOV-019")
class TargetInTheObject(Move):
    """The target is kept in the object for a moment: another thread changes it, now and then."""

    target: torch.device | None = None

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        self.target = device
        shape, dtype = tensor.shape, tensor.dtype
        if shape.numel() == 0 or dtype is torch.bool:
            return None
        return self.rightly(tensor, self.target, non_blocking)


@mutant("MOV-019", crash=True)
class CrashesInThreads(Move):
    """A move in a thread that is not the first takes the process with it."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if threading.get_ident() != self.owner:
            os.abort()
        return tensor
