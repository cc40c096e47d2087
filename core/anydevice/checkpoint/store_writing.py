"""Writing weights to large safetensors files, at the disk's speed and in bounded memory.

Bytes go from the tensors' own memory to the file in pieces; while one piece is written, the next is
made (moved from its device, cast, checksummed). A file is written under a temporary name, synced
and renamed, so a file with its final name is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import torch

from anydevice.checkpoint.store_manifest import DATA_PREFIX, MANIFEST_NAME, Entry, StoredFile
from anydevice.devices import CPU
from anydevice.errors import DiskFullError, OffloadStoreError
from anydevice.sizes import tie_key
from anydevice.tensors import move_tensor

__all__ = [
    "Storable",
    "WeightSource",
    "checksum",
    "is_checksum",
    "nothing_left_on_error",
    "remove_data_files",
    "require_storable",
    "write_atomically",
    "write_files",
]

#: A file is closed when the next weight would make it larger than this.
LARGEST_FILE: Final = 4 << 30
#: Bytes that are in flight at once, twice: one piece being written, one being made.
PIECE: Final = 16 << 20
#: Bytes given to the system at once. With more, Linux caches the file in huge pages, for which it
#: must find memory in one piece: three times slower where memory is in use, measured on ext4.
_ONE_WRITE: Final = 1 << 20
_TEMPORARY: Final = ".tmp"
#: Tensor data begins at a multiple of this in a file; enough for any dtype.
_ALIGNMENT: Final = 64

#: The names of dtypes in safetensors files. Others are stored as bytes; the manifest knows better.
_SAFETENSORS_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


class WeightSource(NamedTuple):
    """A weight that is made only when it is written, such as one that is cast on its way.

    Attributes:
        dtype: of what ``load`` returns.
        shape: of what ``load`` returns.
        load: makes the tensor, on any device; called once, or again when contents are compared.
        identity: names the bytes, for example a file with its size, time and the dtype cast to. Two
            sources with one identity are taken for the same without being loaded. None: unknown.
    """

    dtype: torch.dtype
    shape: Sequence[int]
    load: Callable[[], torch.Tensor]
    identity: str | None = None


#: What can be written.
Storable: TypeAlias = "torch.Tensor | WeightSource"


def _nbytes_of(value: Storable) -> int:
    """Bytes that a weight takes in a file."""
    return math.prod(value.shape) * value.dtype.itemsize


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
        raise OffloadStoreError(
            f"{name} is a {type(value).__name__} of layout {value.layout}, which cannot be stored "
            "as plain bytes: keep its module on the CPU or an accelerator"
        )


def checksum(value: Storable) -> str:
    """Return the checksum of a weight's bytes, which tells them from another model's."""
    if isinstance(value, WeightSource):
        value = value.load()
    total = 0
    for piece in _pieces(value):
        total = zlib.crc32(_bytes_of(piece), total)
    return _checksum(total)


def is_checksum(content: str) -> bool:
    """Whether a weight's content is a checksum of its bytes, and not the identity of its source."""
    return content.startswith("crc32:")


def _checksum(total: int) -> str:
    return f"crc32:{total:08x}"


# ---------------------------------------------------------------------- files


def write_files(
    folder: Path, kept: Collection[str], values: Mapping[str, Storable]
) -> dict[str, Entry]:
    """Write weights to new files in ``folder``, none named as one ``kept``; tied ones once.

    Returns:
        Where each weight is.

    Raises:
        OSError: the system refused.
    """
    owner = _owners(values)
    unique = {name: values[name] for name in owner.values()}
    names = (f"{DATA_PREFIX}{number:05d}.safetensors" for number in itertools.count(1))
    free = (name for name in names if name not in kept)
    written: dict[str, Entry] = {}
    for group in _group(unique):
        path = folder / next(free)
        written |= _write_file(path, {name: unique[name] for name in group})
    _sync_folder(folder)
    return {name: written[owner[name]] for name in values}


def _owners(values: Mapping[str, Storable]) -> dict[str, str]:
    """For each name, the first one that is tied to the same tensor."""
    first: dict[object, str] = {}
    return {
        name: name if isinstance(value, WeightSource) else first.setdefault(tie_key(value), name)
        for name, value in values.items()
    }


@contextlib.contextmanager
def nothing_left_on_error(
    folder: Path, kept: Collection[str], values: Mapping[str, Storable]
) -> Iterator[None]:
    """Write ``values`` inside; where that fails, all data files but those ``kept`` are removed.

    Raises:
        DiskFullError: there is no room for them, seen before or while writing.
    """
    needed = sum(_nbytes_of(values[name]) for name in set(_owners(values).values()))
    if needed > shutil.disk_usage(folder).free:
        raise _disk_full(folder, needed)
    try:
        yield
    except BaseException as error:
        remove_data_files(folder, kept)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise _disk_full(folder, needed) from error
        raise


def remove_data_files(folder: Path, kept: Collection[str]) -> None:
    """Remove all files that anydevice left in ``folder``, half-written ones too, but those kept."""
    for pattern in (f"{DATA_PREFIX}*.safetensors*", f"{MANIFEST_NAME}{_TEMPORARY}"):
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that it is there whole or not at all, also after a loss of power."""
    temporary = path.with_name(path.name + _TEMPORARY)
    descriptor = _create(temporary)
    try:
        _write_all(descriptor, memoryview(data))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make renames in a folder last; a system that cannot open folders needs no such thing."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _group(values: Mapping[str, Storable]) -> Iterator[list[str]]:
    """Divide names into files. Within one, wide dtypes come first, so that all are aligned."""
    group: list[str] = []
    total = 0
    for name, value in values.items():
        if group and total + _nbytes_of(value) > LARGEST_FILE:
            yield sorted(group, key=lambda n: -values[n].dtype.itemsize)
            group, total = [], 0
        group.append(name)
        total += _nbytes_of(value)
    if group:
        yield sorted(group, key=lambda n: -values[n].dtype.itemsize)


def _write_file(path: Path, values: Mapping[str, Storable]) -> dict[str, Entry]:
    header, offsets = _header(values)
    temporary = path.with_name(path.name + _TEMPORARY)
    descriptor = _create(temporary)
    try:
        _write_all(descriptor, memoryview(header))
        contents = _write_values(descriptor, values)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(temporary, path)
    file = StoredFile.of(path, path.name)
    return {
        name: Entry(file, offsets[name], value.dtype, tuple(value.shape), contents[name])
        for name, value in values.items()
    }


def _header(values: Mapping[str, Storable]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and each weight's offset in the file."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name, value in values.items():
        starts[name] = position
        end = position + _nbytes_of(value)
        known = _SAFETENSORS_NAMES.get(value.dtype)
        # A weight of this very name would take the place of the file's metadata.
        table[name + "." if name == "__metadata__" else name] = {
            "dtype": known or "U8",
            "shape": list(value.shape) if known else [end - position],
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    data_start = 8 + len(text)
    return (
        len(text).to_bytes(8, "little") + text,
        {name: data_start + start for name, start in starts.items()},
    )


def _write_values(descriptor: int, values: Mapping[str, Storable]) -> dict[str, str]:
    """Write all bytes in order; a second thread writes while this one makes the next piece."""
    contents: dict[str, str] = {}
    with ThreadPoolExecutor(1, "anydevice-store") as writer:
        writing: Future[None] | None = None
        for name, value in values.items():
            total = 0
            for piece in _checked_pieces(name, value):
                if writing is not None:
                    writing.result()
                writing = writer.submit(_write_piece, descriptor, piece)
                total = zlib.crc32(_bytes_of(piece), total)
            identity = value.identity if isinstance(value, WeightSource) else None
            contents[name] = identity or _checksum(total)
        if writing is not None:
            writing.result()
    return contents


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


def _write_piece(descriptor: int, piece: torch.Tensor) -> None:
    _write_all(descriptor, _bytes_of(piece))


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view[:_ONE_WRITE]) :]


# ---------------------------------------------------------------------- pieces


def _checked_pieces(name: str, value: Storable) -> Iterable[torch.Tensor]:
    if not isinstance(value, WeightSource):
        return _pieces(value)
    tensor = value.load()
    if tensor.dtype is not value.dtype or tuple(tensor.shape) != tuple(value.shape):
        raise OffloadStoreError(
            f"{name} was announced as {value.dtype} {tuple(value.shape)} and came as "
            f"{tensor.dtype} {tuple(tensor.shape)}"
        )
    return _pieces(tensor)


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's elements in order, as contiguous host tensors of about `PIECE` bytes at most."""
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
    """On the host; a conjugate or negative that torch holds as a mere flag is made real."""
    return move_tensor(tensor, CPU).resolve_conj().resolve_neg()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """A contiguous host tensor's memory. Good as long as the tensor lives."""
    array = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


# ---------------------------------------------------------------------- room

#: No space; over a quota; over the largest file that the process or the file system may have.
_DISK_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _disk_full(folder: Path, needed: int) -> DiskFullError:
    error = DiskFullError(
        f"the disk of {folder} has no room for the offloaded weights: {needed:,} bytes needed, "
        f"{shutil.disk_usage(folder).free:,} free. Free some, or name a folder on another disk."
    )
    error.errno = errno.ENOSPC
    return error
