"""Faults of `move`."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import torch
from torch import nn

from anydevice_conformance.mutants.gallery import Fault, mutant


class _Move(Fault):
    """A fault in one direction or both: changes what goes in, or what comes out."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Change what is moved."""
        return tensor

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Change what was moved."""
        return moved

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        moved = super().move(self.before(tensor, device), device, non_blocking=non_blocking)
        return self.after(moved, tensor)


def _to_device(moved: torch.Tensor) -> bool:
    return moved.device.type != "cpu"


@mutant("MOV-001")
class Float64IsCast(_Move):
    """float64 becomes float32."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.float() if tensor.dtype is torch.float64 else tensor


@mutant("MOV-001")
class Float64LosesDigits(_Move):
    """float64 passes through float32, and comes out as float64."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.float().double() if tensor.dtype is torch.float64 else tensor


@mutant("MOV-001")
class Bfloat16ThroughFloat16(_Move):
    """bfloat16 passes through float16."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        wide = tensor.dtype is torch.bfloat16
        return tensor.half().to(torch.bfloat16) if wide else tensor


@mutant("MOV-001")
class BoolIsByte(_Move):
    """bool becomes uint8."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.to(torch.uint8) if tensor.dtype is torch.bool else tensor


@mutant("MOV-001")
class Float8IsCast(_Move):
    """float8 arrives as bfloat16."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        small = tensor.is_floating_point() and tensor.dtype.itemsize == 1
        return tensor.to(torch.bfloat16) if small else tensor


@mutant("MOV-001")
class Complex128LosesDigits(_Move):
    """complex128 passes through complex64."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        wide = tensor.dtype is torch.complex128
        return tensor.to(torch.complex64).to(torch.complex128) if wide else tensor


@mutant("MOV-001")
class ShapeIsFlattened(_Move):
    """What comes back has one dimension."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if _to_device(moved) else moved.reshape(-1)


@mutant("MOV-002")
class NegativeZeroIsLost(_Move):
    """-0.0 arrives as 0.0."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved + 0.0 if moved.dtype is torch.float32 else moved


@mutant("MOV-002")
class NanPayloadIsLost(_Move):
    """Every NaN arrives as the usual one."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            return tensor
        return torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)


@mutant("MOV-002")
class DenormalsAreFlushed(_Move):
    """Denormals arrive as zeros."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.dtype not in (torch.float32, torch.float64):
            return tensor
        tiny = torch.finfo(tensor.dtype).tiny
        return torch.where(tensor.abs() < tiny, torch.zeros_like(tensor), tensor)


@mutant("MOV-002")
class InfinityIsClamped(_Move):
    """Infinities arrive as the largest number, on the way back only."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if _to_device(moved) or moved.dtype is not torch.float16:
            return moved
        width = torch.finfo(moved.dtype)
        return torch.where(moved.isinf(), moved.clamp(width.min, width.max), moved)


@mutant("MOV-003")
class Int64ThroughInt32(_Move):
    """int64 passes through int32."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.int().long() if tensor.dtype is torch.int64 else tensor


@mutant("MOV-003")
class Int64ThroughFloat(_Move):
    """int64 passes through float64, which holds 53 bits."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.double().long() if tensor.dtype is torch.int64 else tensor


@mutant("MOV-003")
class Int32ThroughFloat(_Move):
    """int32 passes through float32, which holds 24 bits."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.float().int() if tensor.dtype is torch.int32 else tensor


@mutant("MOV-003")
class UnsignedIsClamped(_Move):
    """uint8 is clamped to 127."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.clamp(max=127) if tensor.dtype is torch.uint8 else tensor


@mutant("MOV-004")
class IndexIsIgnored(Fault):
    """All goes to device 0."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        first = torch.device(device.type, 0) if device.type == self.device_type else device
        return super().move(tensor, first, non_blocking=non_blocking)


@mutant("MOV-004")
class IndexIsIgnoredWhenQueued(Fault):
    """A non-blocking move goes to the current device."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if non_blocking and device.type == self.device_type:
            device = torch.device(device.type)
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-004")
class StaysOnTheDevice(Fault):
    """A move to the host returns the device's tensor."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if device.type == "cpu":
            return tensor
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-005")
class OnlyLooksMoved(Fault):
    """The device gets zeros; what comes back is the original, which was kept."""

    def __init__(self) -> None:
        self.originals: dict[int, torch.Tensor] = {}

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if device.type == "cpu" and tensor.data_ptr() in self.originals:
            return self.originals[tensor.data_ptr()].clone()
        moved = super().move(tensor, device, non_blocking=non_blocking)
        if device.type != "cpu" and moved.numel():
            self.originals[moved.data_ptr()] = tensor
            moved = moved * 0
        return moved


@mutant("MOV-006")
class EmptyRaises(_Move):
    """A tensor of no bytes is an error."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.numel() == 0:
            raise RuntimeError("invalid argument: size 0")
        return tensor


@mutant("MOV-006")
class ScalarGetsADimension(_Move):
    """A tensor without dimensions comes back with one."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if _to_device(moved) or moved.dim() else moved.reshape(1)


@mutant("MOV-006")
class EmptyLosesShape(_Move):
    """An empty tensor arrives with the shape (0,)."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if moved.numel() else moved.new_empty(0)


@mutant("MOV-007")
class StridesAreLost(_Move):
    """Every tensor arrives contiguous: a channels-last one loses its format."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.contiguous()


@mutant("MOV-007")
class StridesAreLostOnTheWayBack(_Move):
    """Every tensor comes back contiguous."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if _to_device(moved) else moved.contiguous()


@mutant("MOV-007")
class StridesAreIgnored(_Move):
    """The first bytes are copied as if the tensor were contiguous."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        room = tensor.untyped_storage().nbytes() // tensor.itemsize - tensor.storage_offset()
        if tensor.is_contiguous() or room < tensor.numel():
            return tensor
        return torch.as_strided(tensor, (tensor.numel(),), (1,)).view(tensor.shape)


@mutant("MOV-007")
class StepsAreIgnoredOnTheWayBack(_Move):
    """A stepped view of the device comes back as its first elements."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "cpu" or tensor.dim() != 1 or tensor.is_contiguous():
            return tensor
        return torch.as_strided(tensor, tensor.shape, (1,))


@mutant("MOV-008")
class OffsetIsIgnored(_Move):
    """The storage is read from its beginning."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "cpu" or not tensor.storage_offset():
            return tensor
        return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)


@mutant("MOV-008")
class OffsetIsIgnoredOnTheWayBack(_Move):
    """The device's storage is read from its beginning."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type == "cpu" or not tensor.storage_offset():
            return tensor
        return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)


@mutant("MOV-008")
class WholeStorageMoves(Fault):
    """A view takes its whole storage along."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if tensor.device == device or tensor.requires_grad or tensor.is_conj() or tensor.is_neg():
            return super().move(tensor, device, non_blocking=non_blocking)
        count = tensor.untyped_storage().nbytes() // tensor.itemsize
        whole = super().move(torch.as_strided(tensor, (count,), (1,), 0), device)
        return torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset())


@mutant("MOV-009")
class SourceIsMoved(Fault):
    """A Parameter is moved itself, by its data."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        if isinstance(tensor, nn.Parameter):
            tensor.requires_grad_(False)
        return moved


@mutant("MOV-009")
class SourceIsEmptied(Fault):
    """The source's memory is given back early: it holds zeros afterwards."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        if tensor.device.type == "cpu" and device.type != "cpu" and tensor.dim() == 2:
            tensor.detach().zero_()
        return moved


@mutant("MOV-009")
class SourceIsWrittenTo(Fault):
    """The source is resolved in place: its version moves."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if (
            tensor.device.type == "cpu"
            and tensor.dtype is torch.float32
            and not tensor.is_inference()
        ):
            tensor.detach().mul_(1)
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-010")
class AlwaysCopies(Fault):
    """What is there already is copied."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        return moved.clone() if moved is tensor else moved


@mutant("MOV-010")
class ReturnsAnAlias(Fault):
    """What is there already is returned as another object over the same memory."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        moved = super().move(tensor, device, non_blocking=non_blocking)
        return moved.view_as(moved) if moved is tensor and non_blocking else moved


@mutant("MOV-011")
class GradientIsLost(_Move):
    """`requires_grad` is lost."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach()


@mutant("MOV-011")
class GradientIsLostOnTheWayBack(_Move):
    """`requires_grad` is lost on the way to the host."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved if _to_device(moved) else moved.detach()


@mutant("MOV-011")
class GradientStops(_Move):
    """`requires_grad` is copied, and the graph is cut."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach().requires_grad_(source.requires_grad)


@mutant("MOV-011")
class GradientIsInvented(_Move):
    """Every floating tensor on the device requires grad."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        plain = moved.is_floating_point() and moved.is_leaf and not moved.is_inference()
        return moved.requires_grad_() if plain else moved


class _Remembers(Fault):
    """Keeps results and gives them again."""

    def __init__(self) -> None:
        self.results: dict[Any, torch.Tensor] = {}

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        """By what a result is found again; None for not at all."""
        raise NotImplementedError

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        key = self.key(tensor, device)
        if key is None:
            return super().move(tensor, device, non_blocking=non_blocking)
        if key not in self.results:
            self.results[key] = super().move(tensor, device, non_blocking=non_blocking)
        return self.results[key]


@mutant("MOV-012")
class OneResultAStorage(_Remembers):
    """Views of one storage share a result."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if tensor.device.type != "cpu" or device.type == "cpu":
            return None
        return tensor.untyped_storage().data_ptr(), device


@mutant("MOV-012")
class OneResultAnAddress(_Remembers):
    """Tensors that begin at one address share a result, whatever their shape."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if tensor.device.type != "cpu" or device.type == "cpu":
            return None
        return tensor.data_ptr(), device


@mutant("MOV-013")
class RemembersObjects(_Remembers):
    """A tensor that was moved once is not moved again."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        return None if device.type == "cpu" else (id(tensor), tuple(tensor.shape), device)


@mutant("MOV-013")
class RemembersAddresses(_Remembers):
    """A new tensor at an old address gets the old values."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        if device.type == "cpu":
            return None
        return tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, tensor._version, device


@mutant("MOV-013")
class RemembersOnTheWayBack(_Remembers):
    """What the device changed since the last look does not come back."""

    def key(self, tensor: torch.Tensor, device: torch.device) -> Any:
        return (id(tensor), tensor.data_ptr()) if device.type == "cpu" else None


class _Elsewhere(Fault):
    """Copies on a stream that nobody waits for."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        """Whether this move is one of those."""
        raise NotImplementedError

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if not self.wrong(tensor, device, non_blocking) or tensor.numel() == 0:
            return super().move(tensor, device, non_blocking=non_blocking)
        index = (device if device.type == self.device_type else tensor.device).index or 0
        if tensor.device.type == device.type:
            index = tensor.device.index or 0
        with torch.Stream(device=torch.device(self.device_type, index)):
            return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-014")
class QueuedElsewhere(_Elsewhere):
    """A non-blocking copy to the device runs on a hidden stream that is never waited for."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return non_blocking and tensor.device.type == "cpu" and device.type != "cpu"


@mutant("MOV-014")
class PinnedQueuedElsewhere(_Elsewhere):
    """Only copies from pinned memory run on the hidden stream."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        host = tensor.device.type == "cpu" and device.type != "cpu"
        return host and non_blocking and tensor.is_pinned()


@mutant("MOV-015")
class NeverBlocks(Fault):
    """A move to the host is always queued only."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        return super().move(tensor, device, non_blocking=non_blocking or device.type == "cpu")


@mutant("MOV-015")
class ReadsEarly(_Elsewhere):
    """A move to the host does not wait for the kernels before it."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return device.type == "cpu" and tensor.device.type != "cpu" and not non_blocking


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


@mutant("MOV-017")
class BetweenDevicesUnordered(_Elsewhere):
    """A copy between devices runs on a stream that does not wait for the source's work."""

    def wrong(self, tensor: torch.Tensor, device: torch.device, non_blocking: bool) -> bool:
        return tensor.device.type == device.type and tensor.device != device


@mutant("MOV-017")
class BetweenDevicesOverFloat(Fault):
    """A copy between devices goes over the host, in float32."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if tensor.device.type == device.type and tensor.device != device:
            host = super().move(tensor, torch.device("cpu"))
            return super().move(host.float().to(host.dtype), device)
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-017")
class StaysOnTheFirst(Fault):
    """A tensor that is on any device of the type counts as there."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if tensor.device.type == device.type:
            return tensor
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-017")
class BetweenDevicesDetached(_Move):
    """A copy between devices cuts the graph."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return moved.detach() if source.device.type == moved.device.type else moved


@mutant("MOV-018")
class NeedsAnIndex(Fault):
    """A device without an index is an error."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if device.type == self.device_type and device.index is None:
            raise TypeError("an integer is required")
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-018")
class NoIndexMeansLast(Fault):
    """A device without an index is the last one."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if str(device) == self.device_type:
            return super().move(tensor, self.device(self.device_count() - 1))
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-019")
class SharedStaging(Fault):
    """All threads copy through one staging buffer."""

    staged: torch.Tensor | None = None

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if device.type == "cpu":
            return super().move(tensor, device, non_blocking=non_blocking)
        self.staged = tensor
        time.sleep(0.0005)
        return super().move(self.staged, device, non_blocking=non_blocking)


@mutant("MOV-019")
class RefusesThreads(Fault):
    """The runtime belongs to the thread that used it first."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if threading.get_ident() != self.owner:
            raise RuntimeError("context is bound to another thread")
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-019")
class TargetInTheObject(Fault):
    """The target is kept in the object for a moment: another thread changes it, now and then."""

    target: torch.device | None = None

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        self.target = device
        shape, dtype = tensor.shape, tensor.dtype
        if shape.numel() == 0 or dtype is torch.bool:
            return super().move(tensor, device, non_blocking=non_blocking)
        return super().move(tensor, self.target, non_blocking=non_blocking)


@mutant("MOV-019", crash=True)
class CrashesInThreads(Fault):
    """A move in a thread that is not the first takes the process with it."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if threading.get_ident() != self.owner:
            os.abort()
        return super().move(tensor, device, non_blocking=non_blocking)


@mutant("MOV-020", big=True)
class BytesIn32Bits(Fault):
    """Above 4 GiB the byte count wraps: only the rest is copied."""

    def move(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> torch.Tensor:
        if tensor.nbytes < 1 << 32 or tensor.device == device:
            return super().move(tensor, device, non_blocking=non_blocking)
        moved = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        count = (tensor.nbytes & 0xFFFFFFFF) // tensor.itemsize
        moved.view(-1)[:count] = tensor.view(-1)[:count].to(device)
        return moved


@mutant("MOV-021")
class RemainderIsLost(_Move):
    """Elements beyond the last multiple of four arrive as zeros."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        rest = moved.numel() % 4
        if _to_device(moved) and moved.dim() == 1 and moved.numel() > 32 and rest:
            moved = moved.clone()
            moved[-rest:] = 0
        return moved


@mutant("MOV-021")
class OffsetIsAligned(_Move):
    """Reading begins at a multiple of sixteen bytes."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.dim() != 1 or not tensor.is_contiguous():
            return tensor
        offset = tensor.storage_offset()
        aligned = offset - (offset * tensor.itemsize % 16) // tensor.itemsize
        return torch.as_strided(tensor, tensor.shape, tensor.stride(), aligned)


@mutant("MOV-022")
class ConjugateIsLost(_Move):
    """A pending conjugation is forgotten."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return tensor.conj() if tensor.is_conj() else tensor


@mutant("MOV-022")
class NegativeIsLost(_Move):
    """A pending negation is forgotten."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _is_mapped(tensor: torch.Tensor) -> bool:
    """Whether torch's own allocator did not make the memory."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


@mutant("MOV-023")
class RefusesMappedFiles(_Move):
    """Memory that torch's allocator did not make is refused."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if _is_mapped(tensor):
            raise RuntimeError("host pointer is not registered")
        return tensor


@mutant("MOV-023")
class ReadsMappedFromTheStart(_Move):
    """A view of a mapped file is read from the file's beginning."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if _is_mapped(tensor):
            return torch.as_strided(tensor, tensor.shape, tensor.stride(), 0)
        return tensor


@mutant("MOV-024")
class NoInferenceMode(_Move):
    """In inference mode a Parameter cannot be moved."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if torch.is_inference_mode_enabled() and isinstance(tensor, nn.Parameter):
            raise RuntimeError("Inplace update to inference tensor outside InferenceMode")
        return tensor


@mutant("MOV-024")
class ParametersComeBackEmpty(_Move):
    """With gradients off, a Parameter's memory is not copied."""

    def after(self, moved: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        off = not torch.is_grad_enabled() and isinstance(source, nn.Parameter)
        return torch.zeros_like(moved) if off else moved
