"""Faults of `move`: where it leads."""

from __future__ import annotations

import torch

from mutants.gallery import mutant
from mutants.moving import Elsewhere, MaybeMoved, Move


def _is_crossing(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether a move goes between two devices of one type."""
    return tensor.device.type == device.type and tensor.device != device


@mutant("MOV-004")
class IndexIsIgnored(Move):
    """All goes to device 0."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if device.type != self.device_type:
            return None
        return self.rightly(tensor, torch.device(device.type, 0), non_blocking)


@mutant("MOV-004")
class IndexIsIgnoredWhenQueued(Move):
    """A non-blocking move goes to the current device."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if not non_blocking or device.type != self.device_type:
            return None
        return self.rightly(tensor, torch.device(device.type), non_blocking)


@mutant("MOV-004")
class StaysOnTheDevice(Move):
    """A move to the host returns the device's tensor."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        return tensor if device.type == "cpu" else None


@mutant("MOV-017")
class BetweenDevicesUnordered(Elsewhere):
    """A copy between devices runs on a stream that does not wait for the source's work."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return _is_crossing(tensor, device)


@mutant("MOV-017")
class BetweenDevicesOverFloat(Move):
    """A copy between devices goes over the host, in float32."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if not _is_crossing(tensor, device):
            return None
        host = self.rightly(tensor, torch.device("cpu"))
        return self.rightly(host.float().to(host.dtype), device)


@mutant("MOV-017")
class StaysOnTheFirst(Move):
    """A tensor that is on any device of the type counts as there."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        return tensor if tensor.device.type == device.type else None


@mutant("MOV-017")
class BetweenDevicesDetached(Move):
    """A copy between devices cuts the graph."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach() if source.device.type == moved.device.type else moved


@mutant("MOV-018")
class NeedsAnIndex(Move):
    """A device without an index is an error."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == self.device_type and device.index is None:
            raise TypeError("an integer is required")
        return tensor


@mutant("MOV-018")
class NoIndexMeansLast(Move):
    """A device without an index is the last one."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if str(device) != self.device_type:
            return None
        return self.rightly(tensor, self.device(self.device_count() - 1))
