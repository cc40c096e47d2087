"""Faults of `move`: shapes, strides, offsets and storages."""

from __future__ import annotations

import torch

from mutants.gallery import mutant
from mutants.moving import MaybeMoved, Move, is_to_host


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether torch's own allocator did not make the memory."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


@mutant("MOV-006")
class EmptyRaises(Move):
    """A tensor of no bytes is an error."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.numel() == 0:
            raise RuntimeError("invalid argument: size 0")
        return tensor


@mutant("MOV-006")
class ScalarGetsADimension(Move):
    """A tensor without dimensions comes back with one."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if moved.device.type != "cpu" or moved.dim() else moved.reshape(1)


@mutant("MOV-006")
class EmptyLosesShape(Move):
    """An empty tensor arrives with the shape (0,)."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if moved.numel() else moved.new_empty(0)


@mutant("MOV-007")
class StridesAreLost(Move):
    """Every tensor arrives contiguous: a channels-last one loses its format."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.contiguous()


@mutant("MOV-007")
class StridesAreLostOnTheWayBack(Move):
    """Every tensor comes back contiguous."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if moved.device.type != "cpu" else moved.contiguous()


@mutant("MOV-007")
class StridesAreIgnored(Move):
    """The first bytes are copied as if the tensor were contiguous."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        if tensor.is_contiguous() or room < tensor.numel():
            return tensor
        return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(tensor.shape)


@mutant("MOV-007")
class StepsAreIgnoredOnTheWayBack(Move):
    """A stepped view of the device comes back as its first elements."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "cpu" or tensor.dim() != 1 or tensor.is_contiguous():
            return tensor
        return torch.as_strided(tensor, tensor.shape, (1,))


@mutant("MOV-008")
class OffsetIsIgnored(Move):
    """The storage is read from its beginning."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "cpu" or not tensor.storage_offset():
            return tensor
        return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)


@mutant("MOV-008")
class OffsetIsIgnoredOnTheWayBack(Move):
    """The device's storage is read from its beginning."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "cpu" or not tensor.storage_offset():
            return tensor
        return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)


@mutant("MOV-008")
class WholeStorageMoves(Move):
    """A view takes its whole storage along."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if tensor.device == device or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return None
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        whole = self.rightly(torch.as_strided(tensor, (count,), (1,), 0), device)
        return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


@mutant("MOV-023")
class RefusesMappedFiles(Move):
    """Memory that torch's allocator did not make is refused."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if _is_mapped(tensor):
            raise RuntimeError("host pointer is not registered")
        return tensor


@mutant("MOV-023")
class ReadsMappedFromTheStart(Move):
    """A view of a mapped file is read from the file's beginning."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if _is_mapped(tensor):
            return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)
        return tensor


@mutant("MOV-007", check="test_MOV_025_every_combination")
class OneImageLosesItsFormat(Move):
    """A batch of one image comes home contiguous: one of its sizes is 1, as are two strides."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        one = tensor.dim() == 4 and tensor.shape[0] == 1 and is_to_host(tensor, device)
        return tensor.contiguous() if one else tensor


@mutant("MOV-008", check="test_MOV_025_every_combination")
class WidthsIn16Bits(Move):
    """Rows of a wide matrix's columns are copied as far as their width modulo 65,536 goes."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        width = source.shape[-1] * source.itemsize if source.dim() == 2 else 0
        if width > 65_536 and not source.is_contiguous() and source.stride(1) == 1:
            moved.detach()[:, width % 65_536 // source.itemsize :] = 0
        return moved


@mutant("MOV-025", check="test_MOV_025_every_combination")
class ExpandedStaysExpanded(Move):
    """A row that is expanded is copied once, and expanded again on the device."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if tensor.dim() != 2 or tensor.stride(0) or len(tensor) < 2 or tensor.requires_grad:
            return None
        return self.rightly(tensor[:1], device, non_blocking).expand(tensor.shape)
