"""Writing weights to large safetensors files, at the disk's speed and in bounded memory.

Bytes go from the tensors' own memory to the file in pieces; while one piece is written, the next is
made. A file is written under a temporary name and renamed, so a file with its final name is whole.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import os
import queue
import shutil
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from anydevice.checkpoint.safetensors_file import DTYPES
from anydevice.errors import DiskFullError
from anydevice.interrupts import check
from anydevice.offload_store.manifest import DATA_PREFIX, MANIFEST_NAME, Entry, StoredFile
from anydevice.offload_store.tensor_bytes import (
    Storable,
    WeightSource,
    as_checksum,
    nbytes_of,
    pieces_of,
)
from anydevice.tensors import memory_of
from anydevice.ties import tie_key

__all__ = ["nothing_left_on_error", "remove_data_files", "write_atomically", "write_files"]

#: A file is closed when the next weight would make it larger than this.
LARGEST_FILE: Final = 4 << 30
#: Bytes given to the system at once. With more, Linux caches the file in huge pages, for which it
#: must find memory in one piece: three times slower where memory is in use, measured on ext4.
_ONE_WRITE: Final = 1 << 20
_TEMPORARY: Final = ".tmp"
#: Tensor data begins at a multiple of this in a file; enough for any dtype.
_ALIGNMENT: Final = 64

#: The names of dtypes in safetensors files. Others are stored as bytes; the manifest knows better.
_SAFETENSORS_NAMES: Final = {dtype: name for name, (dtype, bits) in DTYPES.items() if bits >= 8}


def write_files(
    folder: Path, kept: Collection[str], values: Mapping[str, Storable]
) -> dict[str, Entry]:
    """Write weights to new files in ``folder``, none named as one ``kept``; tied ones once.

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
        DiskFullError: the disk is full, seen before or while writing.
    """
    needed = sum(nbytes_of(values[name]) for name in set(_owners(values).values()))
    if needed > shutil.disk_usage(folder).free:
        raise _disk_full(folder, needed)
    try:
        yield
    except BaseException as error:
        remove_data_files(folder, kept)
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            raise _disk_full(folder, needed, error.errno) from error
        raise


def remove_data_files(folder: Path, kept: Collection[str]) -> None:
    """Remove all files that anydevice left in ``folder``, half-written ones too, but those kept."""
    for pattern in (f"{DATA_PREFIX}*.safetensors*", f"{MANIFEST_NAME}{_TEMPORARY}"):
        for path in folder.glob(pattern):
            if path.name not in kept:
                path.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file so that a reader finds all of it or nothing."""
    temporary = path.with_name(path.name + _TEMPORARY)
    with _create(temporary) as file:
        _write_all(file.fileno(), memoryview(data))
    os.replace(temporary, path)


def _group(values: Mapping[str, Storable]) -> Iterator[list[str]]:
    """Divide names into files. Within one, wide dtypes come first, so that all are aligned."""
    group: list[str] = []
    total = 0
    for name, value in values.items():
        if group and total + nbytes_of(value) > LARGEST_FILE:
            yield sorted(group, key=lambda n: -values[n].dtype.itemsize)
            group, total = [], 0
        group.append(name)
        total += nbytes_of(value)
    if group:
        yield sorted(group, key=lambda n: -values[n].dtype.itemsize)


def _write_file(path: Path, values: Mapping[str, Storable]) -> dict[str, Entry]:
    header, offsets = _header(values)
    temporary = path.with_name(path.name + _TEMPORARY)
    with _create(temporary) as file:
        _write_all(file.fileno(), memoryview(header))
        sums = _write_values(file.fileno(), values)
    os.replace(temporary, path)
    stored = StoredFile.of(path, path.name)
    return {
        name: Entry(
            stored,
            offsets[name],
            value.dtype,
            tuple(value.shape),
            (value.identity if isinstance(value, WeightSource) else None) or sums[name],
            sums[name],
        )
        for name, value in values.items()
    }


def _header(values: Mapping[str, Storable]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a safetensors file, and each weight's offset in the file."""
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts: dict[str, int] = {}
    position = 0
    for name, value in values.items():
        starts[name] = position
        end = position + nbytes_of(value)
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
    """Write all bytes in order, and return the checksum of each weight."""
    sums: dict[str, str] = {}
    writer = _Writer(descriptor)
    try:
        writer.start()
        for name, value in values.items():
            total = 0
            for piece in pieces_of(name, value):
                check()
                writer.put(piece)
                total = zlib.crc32(memory_of(piece), total)
            sums[name] = as_checksum(total)
    finally:
        writer.finish()
    return sums


class _Writer(threading.Thread):
    """Writes one piece while the next one is made (moved from its device, cast, checksummed)."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="anydevice-write", daemon=True)
        self._descriptor = descriptor
        self._pieces: queue.Queue[torch.Tensor | None] = queue.Queue(1)
        self._error: OSError | None = None

    def run(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if self._error is None:
                try:
                    _write_all(self._descriptor, memory_of(piece))
                except OSError as error:
                    self._error = error

    def put(self, piece: torch.Tensor) -> None:
        """Have a piece written; one more may wait for its turn."""
        if self._error is not None:
            raise self._error
        self._pieces.put(piece)

    def finish(self) -> None:
        """Wait until the thread has ended. Must be called before the descriptor is closed."""
        if self.is_alive():
            self._pieces.put(None)
            self.join()
        if self._error is not None:
            raise self._error


def _create(path: Path) -> io.FileIO:
    return open(path, "wb", buffering=0)


def _write_all(descriptor: int, view: memoryview) -> None:
    while view:
        view = view[os.write(descriptor, view[:_ONE_WRITE]) :]


# ---------------------------------------------------------------------- a full disk

#: The system's codes for "no more", with what they mean.
_DISK_FULL: Final = {
    errno.ENOSPC: "it is full",
    errno.EDQUOT: "the user's quota is used up",
    errno.EFBIG: "a file reached the largest size that the process (ulimit -f) or the file system "
    "allows",
}


def _disk_full(folder: Path, needed: int, code: int = errno.ENOSPC) -> DiskFullError:
    error = DiskFullError(
        f"the disk of {folder} cannot take the offloaded weights: {_DISK_FULL[code]}. "
        f"{needed:,} bytes are needed, {shutil.disk_usage(folder).free:,} are free on it. Free "
        "some, raise the limit, or name a folder on another disk."
    )
    error.errno = code
    return error
