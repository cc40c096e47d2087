"""What can be stored, and its bytes: tensors of any device and strides, as pieces on the host."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeAlias

import torch

from anydevice.devices import CPU
from anydevice.errors import OffloadStoreError
from anydevice.interrupts import check
from anydevice.tensors import memory_of, move_tensor

__all__ = [
    "Storable",
    "WeightSource",
    "as_checksum",
    "checksum",
    "is_plain_dtype",
    "is_shape",
    "nbytes_of",
    "pieces_of",
    "require_storable",
]

#: Bytes of one piece, at most.
PIECE: Final = 16 << 20
#: Their numbers mean nothing without scales, and reading them as such ends the process.
_QUANTIZED: Final = frozenset({"qint8", "quint8", "qint32", "quint4x2", "quint2x4"})


class WeightSource(NamedTuple):
    """A weight that is made only when it is written, such as one that is cast.

    Attributes:
        dtype: of what ``load`` returns.
        shape: of what ``load`` returns.
        load: makes the tensor, on any device, or its elements in order as several tensors; called
            once, or again when contents are compared.
        identity: names the bytes, for example a file with its size, time and the dtype cast to. Two
            sources with one identity are taken for the same without being loaded. None: unknown.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    load: Callable[[], torch.Tensor | Iterable[torch.Tensor]]
    identity: str | None = None


#: What can be written.
Storable: TypeAlias = "torch.Tensor | WeightSource"


def nbytes_of(value: Storable) -> int:
    """Bytes that a weight takes in a file."""
    return math.prod(value.shape) * value.dtype.itemsize


def is_plain_dtype(dtype: torch.dtype) -> bool:
    """Whether bytes alone make a tensor of this dtype."""
    return str(dtype).removeprefix("torch.") not in _QUANTIZED


def is_shape(value: object) -> bool:
    """Whether what a file gives as a shape is one that torch can address, even if it is empty."""
    if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
        return False
    return math.prod(size or 1 for size in value) < 2**63


def require_storable(name: str, value: Storable) -> None:
    """Make sure that a weight is plain bytes.

    Raises:
        OffloadStoreError: it holds no data, or is more than one block of numbers.
    """
    if isinstance(value, WeightSource):
        return
    if value.is_meta:
        raise OffloadStoreError(
            f"{name} is on meta and has no data to write: load the model before it is offloaded"
        )
    if value.layout is not torch.strided or hasattr(value, "__tensor_flatten__"):
        kind = f"a {type(value).__name__} of layout {value.layout}"
    elif value.is_quantized:
        kind = f"a quantized tensor ({value.dtype}), more than its integers"
    elif value.is_nested:
        kind = "a nested tensor"
    else:
        return
    raise OffloadStoreError(
        f"{name} is {kind}, which cannot be stored as plain bytes: keep its module on the CPU or "
        "an accelerator"
    )


def checksum(value: Storable) -> str:
    """Return the checksum of a weight's bytes."""
    total = 0
    for piece in pieces_of("a weight", value):
        check()
        total = zlib.crc32(memory_of(piece), total)
    return as_checksum(total)


def as_checksum(total: int) -> str:
    """A CRC-32 as the content of a weight."""
    return f"crc32:{total:08x}"


def pieces_of(name: str, value: Storable) -> Iterable[torch.Tensor]:
    """A weight's elements in order, as contiguous host tensors of about `PIECE` bytes at most.

    Raises:
        OffloadStoreError: a source made another tensor than it had announced.
    """
    if not isinstance(value, WeightSource):
        return _pieces(value)
    made = value.load()
    if not isinstance(made, torch.Tensor):
        return _joined(name, value, made)
    if made.dtype is not value.dtype or tuple(made.shape) != tuple(value.shape):
        raise _unlike(name, value, f"{made.dtype} {tuple(made.shape)}")
    return _pieces(made)


def _joined(
    name: str, source: WeightSource, parts: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """The pieces of all parts, which must make up the weight."""
    count = 0
    for part in parts:
        count += part.numel()
        if part.dtype is not source.dtype or count > math.prod(source.shape):
            raise _unlike(name, source, f"{count} or more elements, some of {part.dtype}")
        yield from _pieces(part)
    if count != math.prod(source.shape):
        raise _unlike(name, source, f"{count} elements")


def _unlike(name: str, source: WeightSource, made: str) -> OffloadStoreError:
    return OffloadStoreError(
        f"{name} was announced as {source.dtype} {tuple(source.shape)} and came as {made}"
    )


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        step = PIECE // tensor.dtype.itemsize
        for start in range(0, flat.numel(), step):
            yield _to_host(flat[start : start + step])
    elif tensor.nbytes <= PIECE:
        yield _to_host(tensor.contiguous())
    elif len(tensor) == 1:
        yield from _pieces(tensor[0])
    else:
        rows = max(1, len(tensor) * PIECE // tensor.nbytes)
        for part in tensor.split(rows):  # type: ignore[no-untyped-call]
            yield from _pieces(part)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """On the host; a lazy conjugate or negative (a flag in torch) is materialized."""
    return move_tensor(tensor, CPU).resolve_conj().resolve_neg()
