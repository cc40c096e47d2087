"""Safetensors files: the header, read and checked; the tensors, mapped.

The format: 8 bytes, little-endian, that give the length of the header; the header, a JSON object
of tensor names to ``dtype``, ``shape`` and ``data_offsets``; then the tensors' bytes, without gaps.
See https://github.com/huggingface/safetensors#format. A file is refused unless its header accounts
for each byte of it exactly once.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.mapped import MappedFile
from anydevice.checkpoint.strict_json import LARGEST_JSON, parse_json
from anydevice.errors import CorruptCheckpointError

__all__ = ["looks_like_safetensors", "read_header"]

_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
_FIELDS: Final = frozenset({"dtype", "shape", "data_offsets"})
#: Sizes beyond this cannot be addressed by torch, not even in a tensor without elements.
_LARGEST_COUNT: Final = 2**63

#: The format's names of dtypes, with torch's and the bits of an element. Torch may be too old for
#: some, and has no 6-bit floats at all.
_DTYPES: Final[dict[str, tuple[str, int]]] = {
    "BOOL": ("bool", 8),
    "U8": ("uint8", 8),
    "I8": ("int8", 8),
    "U16": ("uint16", 16),
    "I16": ("int16", 16),
    "U32": ("uint32", 32),
    "I32": ("int32", 32),
    "U64": ("uint64", 64),
    "I64": ("int64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "C64": ("complex64", 64),
}


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file's first bytes are those of a safetensors file."""
    return len(start) > _LENGTH_BYTES and start[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def read_header(file: MappedFile) -> dict[str, TensorInfo]:
    """Read what tensors a safetensors file holds.

    Raises:
        CorruptCheckpointError: the header contradicts itself or the file; the message names both.
    """
    raw = file.read(0, _LENGTH_BYTES)
    if len(raw) < _LENGTH_BYTES:
        raise _corrupt(file, f"it has only {file.nbytes} bytes")
    length = int.from_bytes(raw, "little")
    start = _LENGTH_BYTES + length
    if length > LARGEST_JSON:
        raise _corrupt(
            file, f"its header is said to have {length:,} bytes; {LARGEST_JSON:,} is most"
        )
    if start > file.nbytes:
        raise _corrupt(
            file, f"its header is said to end at byte {start:,}, and the file at {file.nbytes:,}"
        )
    text = file.read(_LENGTH_BYTES, length)
    if not text.startswith(b"{"):
        raise _corrupt(file, "its header does not begin with '{'")
    header = parse_json(text, f"the header of {file.path}")
    _check_metadata(file, header.pop(_METADATA, None))
    infos = {name: _info(file, name, entry, start) for name, entry in header.items()}
    _check_layout(file, infos, start)
    return infos


def _check_metadata(file: MappedFile, metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(file, f"its {_METADATA} is not a mapping of text to text")


def _info(file: MappedFile, name: str, entry: Any, data_start: int) -> TensorInfo:
    if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
        raise _corrupt(file, f"tensor {name!r:.200} has no dtype, shape and data_offsets")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise _corrupt(file, f"tensor {name!r:.200} has the shape {shape!r:.200}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise _corrupt(file, f"tensor {name!r:.200} has the data_offsets {offsets!r:.200}")
    begin, end = offsets
    dtype, bits = _dtype(file, name, entry["dtype"])
    count = _count(file, name, shape)
    if count * bits != (end - begin) * 8 or end < begin:
        raise _corrupt(
            file,
            f"tensor {name!r:.200}, {entry['dtype']} {shape}, needs {count * bits / 8:,.1f} bytes "
            f"and is given {end - begin:,}",
        )
    if data_start + end > file.nbytes:
        raise _corrupt(
            file,
            f"tensor {name!r:.200} is said to end at byte {data_start + end:,}, and the file ends "
            f"at {file.nbytes:,}",
        )
    return TensorInfo(
        dtype, _torch_shape(file, name, shape, bits), end - begin, file.path, data_start + begin
    )


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _dtype(file: MappedFile, name: str, spelled: Any) -> tuple[torch.dtype, int]:
    known = _DTYPES.get(spelled) if isinstance(spelled, str) else None
    if known is None:
        raise _corrupt(file, f"tensor {name!r:.200} has the unknown dtype {spelled!r:.50}")
    dtype = getattr(torch, known[0], None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(
            f"tensor {name!r:.200} of {file.path} has dtype {spelled}, which torch "
            f"{torch.__version__} cannot hold"
        )
    return dtype, known[1]


def _count(file: MappedFile, name: str, shape: list[int]) -> int:
    """Elements of a shape; an overflow on the way is one also where some size is 0."""
    count = nonzero = 1
    for size in shape:
        count *= size
        nonzero *= size or 1
        if nonzero >= _LARGEST_COUNT:
            raise _corrupt(file, f"tensor {name!r:.200} has the shape {shape!r:.200}: too large")
    return count


def _torch_shape(file: MappedFile, name: str, shape: list[int], bits: int) -> tuple[int, ...]:
    """Torch counts pairs of 4-bit numbers, the format counts numbers."""
    if bits != 4:
        return tuple(shape)
    if not shape or shape[-1] % 2:
        raise _corrupt(file, f"tensor {name!r:.200} has an odd number of 4-bit numbers in a row")
    return (*shape[:-1], shape[-1] // 2)


def _check_layout(file: MappedFile, infos: dict[str, TensorInfo], data_start: int) -> None:
    """Every byte behind the header belongs to exactly one tensor."""
    position = data_start
    ordered = sorted(infos.items(), key=lambda item: (item[1].offset, item[1].nbytes))
    for name, info in ordered:
        assert info.offset is not None
        if info.offset != position:
            fault = "overlaps the one before it" if info.offset < position else "leaves a gap"
            raise _corrupt(file, f"tensor {name!r:.200} {fault}")
        position += info.nbytes
    if position != file.nbytes:
        raise _corrupt(
            file, f"its tensors end at byte {position:,}, and the file at {file.nbytes:,}"
        )


def _corrupt(file: MappedFile, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{file.path} is not a whole safetensors file: {why}. Fetch it again, or save it again."
    )
