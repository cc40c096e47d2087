"""Safetensors files: the header, read and checked; the tensors, mapped.

The format: 8 bytes, little-endian, that give the length of the header; the header, a JSON object
of tensor names to ``dtype``, ``shape`` and ``data_offsets``; then the tensors' bytes, without gaps.
See https://github.com/huggingface/safetensors#format. A file is refused unless its header accounts
for each byte of it exactly once.
"""

from __future__ import annotations

import operator
from typing import Any, Final

import torch

from anydevice.checkpoint.info import TensorInfo
from anydevice.checkpoint.mapped import MappedFile
from anydevice.checkpoint.strict_json import LARGEST_JSON, parse_json
from anydevice.errors import CorruptCheckpointError

__all__ = ["DTYPES", "looks_like_safetensors", "read_header", "what_text_it_is"]

_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
#: Sizes beyond this cannot be addressed by torch, not even in a tensor without elements.
_LARGEST_COUNT: Final = 2**63

_PLACE: Final = operator.attrgetter("offset", "nbytes")

#: The format's names of dtypes, with torch's and the bits of an element.
_NAMES: Final[dict[str, tuple[str, int]]] = {
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
#: With torch's dtypes: it may be too old for some, and has no 6-bit floats at all.
DTYPES: Final[dict[str, tuple[torch.dtype | None, int]]] = {
    spelled: (getattr(torch, name, None), bits) for spelled, (name, bits) in _NAMES.items()
}


def looks_like_safetensors(start: bytes) -> bool:
    """Whether a file's first bytes are those of a safetensors file."""
    return len(start) > _LENGTH_BYTES and start[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{"


def what_text_it_is(start: bytes) -> str | None:
    """What was fetched instead of a file of weights, and what to do; None: unknown.

    Args:
        start: the file's first 100 bytes.
    """
    if start.startswith(b"version https://git-lfs"):
        return "a pointer of git-lfs, to a file that was not fetched: run `git lfs pull`."
    if start.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return (
            "a web page, such as one that asks to log in, or says that there is no such file: "
            "look at it, and fetch the file itself."
        )
    return None


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
        found = what_text_it_is(file.read(0, 100))
        if found is not None:
            raise CorruptCheckpointError(f"{file.path} is not a safetensors file: it is {found}")
        raise _corrupt(
            file, f"its header should have {length:,} bytes; at most {LARGEST_JSON:,} are allowed"
        )
    if start > file.nbytes:
        raise _corrupt(
            file, f"its header should end at byte {start:,}, but the file ends at {file.nbytes:,}"
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
    # Called for each tensor whenever a checkpoint is opened, so it must be quick.
    try:
        spelled, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, LookupError):
        raise _corrupt(file, f"tensor {name!r:.200} has no dtype, shape and data_offsets") from None
    dtype, bits = _dtype(file, name, spelled)
    count = _count(file, name, shape)
    begin, end = offsets if type(offsets) is list and len(offsets) == 2 else (None, None)
    if type(begin) is not int or type(end) is not int or not 0 <= begin < _LARGEST_COUNT:
        raise _corrupt(file, f"tensor {name!r:.200} has the data_offsets {offsets!r:.200}")
    if count * bits != (end - begin) * 8:
        raise _corrupt(
            file,
            f"tensor {name!r:.200}, {spelled} {shape!r:.200}, needs {count * bits / 8:,.1f} bytes, "
            f"but has data_offsets {offsets!r:.200}",
        )
    if data_start + end > file.nbytes:
        raise _corrupt(
            file,
            f"tensor {name!r:.200} should end at byte {data_start + end:,}, but the file ends "
            f"at {file.nbytes:,}",
        )
    sizes = tuple(shape) if bits != 4 else _pairs(file, name, shape)
    return TensorInfo(dtype, sizes, end - begin, file.path, data_start + begin)


def _dtype(file: MappedFile, name: str, spelled: Any) -> tuple[torch.dtype, int]:
    dtype, bits = DTYPES.get(spelled, (None, 0)) if type(spelled) is str else (None, 0)
    if dtype is None:
        if not bits:
            raise _corrupt(file, f"tensor {name!r:.200} has the unknown dtype {spelled!r:.50}")
        raise CorruptCheckpointError(
            f"tensor {name!r:.200} of {file.path} has dtype {spelled}, which torch "
            f"{torch.__version__} cannot hold"
        )
    return dtype, bits


def _count(file: MappedFile, name: str, shape: Any) -> int:
    """Elements of a shape; an overflow counts also where a size is 0."""
    count = nonzero = 1
    for size in shape if type(shape) is list else (None,):
        if type(size) is not int or size < 0:
            raise _corrupt(file, f"tensor {name!r:.200} has the shape {shape!r:.200}")
        count *= size
        nonzero *= size or 1
        if nonzero >= _LARGEST_COUNT:
            raise _corrupt(file, f"tensor {name!r:.200} has the shape {shape!r:.200}: too large")
    return count


def _pairs(file: MappedFile, name: str, shape: list[int]) -> tuple[int, ...]:
    """Torch counts pairs of 4-bit numbers, the format counts numbers."""
    if not shape or shape[-1] % 2:
        raise _corrupt(file, f"tensor {name!r:.200} has an odd number of 4-bit numbers in a row")
    return (*shape[:-1], shape[-1] // 2)


def _check_layout(file: MappedFile, infos: dict[str, TensorInfo], data_start: int) -> None:
    """Every byte behind the header belongs to exactly one tensor."""
    position = data_start
    for info in sorted(infos.values(), key=_PLACE):
        if info.offset != position:
            name = next(name for name, other in infos.items() if other is info)
            fault = "leaves a gap" if _PLACE(info) > (position,) else "overlaps the one before it"
            raise _corrupt(file, f"tensor {name!r:.200} {fault}")
        position += info.nbytes
    if position != file.nbytes:
        raise _corrupt(
            file, f"its tensors end at byte {position:,}, but the file ends at {file.nbytes:,}"
        )


def _corrupt(file: MappedFile, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"{file.path} is not a complete safetensors file: {why}. Fetch it again, or save it again."
    )
