"""Faults of `move`: values, bit for bit."""

from __future__ import annotations

import torch

from mutants.gallery import mutant
from mutants.moving import MaybeMoved, Move


@mutant("MOV-001")
class Float64IsCast(Move):
    """float64 becomes float32."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.float() if tensor.dtype is torch.float64 else tensor


@mutant("MOV-001")
class Float64LosesDigits(Move):
    """float64 passes through float32, and comes out as float64."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.float().double() if tensor.dtype is torch.float64 else tensor


@mutant("MOV-001")
class Bfloat16ThroughFloat16(Move):
    """bfloat16 passes through float16."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        wide = tensor.dtype is torch.bfloat16
        return tensor.half().to(torch.bfloat16) if wide else tensor


@mutant("MOV-001")
class BoolIsByte(Move):
    """bool becomes uint8."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


@mutant("MOV-001")
class Float8IsCast(Move):
    """float8 arrives as bfloat16."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        small = tensor.is_floating_point() and tensor.dtype.itemsize == 1
        return tensor.to(torch.bfloat16) if small else tensor


@mutant("MOV-001")
class Complex128LosesDigits(Move):
    """complex128 passes through complex64."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        wide = tensor.dtype is torch.complex128
        return tensor.to(torch.complex64).to(torch.complex128) if wide else tensor


@mutant("MOV-001")
class ShapeIsFlattened(Move):
    """What comes back has one dimension."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if moved.device.type != "cpu" else moved.reshape(-1)


@mutant("MOV-002")
class NegativeZeroIsLost(Move):
    """-0.0 arrives as 0.0."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved + 0.0 if moved.dtype is torch.float32 else moved


@mutant("MOV-002")
class NanPayloadIsLost(Move):
    """Every NaN arrives as the usual one."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            return tensor
        return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


@mutant("MOV-002")
class DenormalsAreFlushed(Move):
    """Denormals arrive as zeros."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.dtype not in (torch.float32, torch.float64):
            return tensor
        tiny = torch.finfo(tensor.dtype).tiny
        return torch.where(tensor.abs() < tiny, torch.zeros_like(tensor), tensor)


@mutant("MOV-002")
class InfinityIsClamped(Move):
    """Infinities arrive as the largest number, on the way back only."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if moved.device.type != "cpu" or moved.dtype is not torch.float16:
            return moved
        width = torch.finfo(moved.dtype)
        return torch.where(moved.isinf(), moved.clamp(width.min, width.max), moved)


@mutant("MOV-003")
class Int64ThroughInt32(Move):
    """int64 passes through int32."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.int().long() if tensor.dtype is torch.int64 else tensor


@mutant("MOV-003")
class Int64ThroughFloat(Move):
    """int64 passes through float64, which holds 53 bits."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.double().long() if tensor.dtype is torch.int64 else tensor


@mutant("MOV-003")
class Int32ThroughFloat(Move):
    """int32 passes through float32, which holds 24 bits."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.float().int() if tensor.dtype is torch.int32 else tensor


@mutant("MOV-003")
class UnsignedIsClamped(Move):
    """uint8 is clamped to 127."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.clamp(max=127) if tensor.dtype is torch.uint8 else tensor


@mutant("MOV-005")
class OnlyLooksMoved(Move):
    """The device gets zeros; what comes back is the original, which was kept."""

    def __init__(self) -> None:
        self.originals: dict[int, torch.Tensor] = {}

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        kept = self.originals.get(tensor.data_ptr()) if device.type == "cpu" else None
        return None if kept is None else kept.clone()

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if moved.device.type == "cpu" or not moved.numel():
            return moved
        zeros = torch.zeros_like(moved)
        self.originals[zeros.data_ptr()] = source
        return zeros


@mutant("MOV-020", big=True)
class BytesIn32Bits(Move):
    """Above 4 GiB the byte count wraps: only the rest is copied."""

    def instead(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> MaybeMoved:
        if tensor.nbytes < 1 << 32 or tensor.device == device:
            return None
        moved = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        count = (tensor.nbytes & 0xFFFFFFFF) // tensor.itemsize
        moved.view(-1)[:count] = tensor.view(-1)[:count].to(device)
        return moved


@mutant("MOV-021")
class RemainderIsLost(Move):
    """Elements beyond the last multiple of four arrive as zeros."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        rest = moved.numel() % 4
        if moved.device.type != "cpu" and moved.dim() == 1 and moved.numel() > 32 and rest:
            moved = moved.clone()
            moved[-rest:] = 0
        return moved


@mutant("MOV-021")
class OffsetIsAligned(Move):
    """Reading begins at a multiple of sixteen bytes."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            return tensor
        offset = tensor.storage_offset()
        aligned = offset - (offset * tensor.itemsize % 16) // tensor.itemsize
        return torch.as_strided(tensor, tensor.shape, tensor.stride(), aligned)


@mutant("MOV-022")
class ConjugateIsLost(Move):
    """A pending conjugation is forgotten."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.conj() if tensor.is_conj() else tensor


@mutant("MOV-022")
class NegativeIsLost(Move):
    """A pending negation is forgotten."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch._neg_view(tensor) if tensor.is_neg() else tensor
