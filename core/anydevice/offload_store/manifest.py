"""The manifest of an offload store: what the folder holds. It is written last.

The manifest names every weight with its place (file, offset), dtype, shape and *content*: the
checksum of its bytes, or the identity of the source that they come from. Files are known by size
and time of change, so a file that was replaced, cut or removed is noticed.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from anydevice.checkpoint.strict_json import parse_json, read_bounded
from anydevice.errors import CheckpointError, OffloadStoreError
from anydevice.offload_store.tensor_bytes import is_plain_dtype, is_shape

__all__ = [
    "DATA_PREFIX",
    "LOCK_NAME",
    "MANIFEST_NAME",
    "Entry",
    "Manifest",
    "StoredFile",
    "current_boot",
]

MANIFEST_NAME: Final = "anydevice-offload.json"
LOCK_NAME: Final = "anydevice-offload.lock"
#: Every data file that anydevice writes to an offload folder begins so, and no other file does.
DATA_PREFIX: Final = "anydevice-offload-"

_FORMAT: Final = "anydevice offload store"
_VERSION: Final = 2


@functools.cache
def current_boot() -> str:
    """Identifies this run of the machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{psutil.boot_time():.0f}"


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """A file that holds weights, as it was when the store was made.

    Attributes:
        path: absolute for a file that the store only points into; else a name in its folder.
        nbytes: its size.
        mtime_ns: when it last changed, in nanoseconds.
    """

    path: str
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: str | os.PathLike[str], name: str | None = None) -> StoredFile:
        """Describe the file at ``path`` as it is now; ``name`` is its name in the manifest."""
        status = os.stat(path)
        return cls(name or os.path.abspath(path), status.st_size, status.st_mtime_ns)

    def check(self, folder: Path) -> Path:
        """Return the file's full path.

        Raises:
            OffloadStoreError: it is gone, or has changed.
        """
        path = folder / self.path
        try:
            now = StoredFile.of(path)
        except OSError as error:
            raise OffloadStoreError(
                f"{path}, which holds weights of the offload store {folder}, cannot be opened: "
                f"{error.strerror or error}. {_again(folder)}"
            ) from None
        if now.nbytes != self.nbytes:
            raise OffloadStoreError(
                f"{path} changed under the offload store {folder}: it has {now.nbytes} bytes, and "
                f"had {self.nbytes}. {_again(folder)}"
            )
        if now.mtime_ns != self.mtime_ns:
            raise OffloadStoreError(
                f"{path} was written to after the offload store {folder} was made. {_again(folder)}"
            )
        return path


@dataclasses.dataclass(frozen=True)
class Entry:
    """One weight.

    Attributes:
        file: the file that holds it.
        offset: of its first byte, from the file's beginning.
        dtype: its dtype.
        shape: its shape.
        content: identifies its bytes: ``"crc32:..."``, or the identity of a source.
        checksum: of the bytes that were written; None where the store points into another file.
    """

    file: StoredFile
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    content: str
    checksum: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a store holds.

    Attributes:
        entries: all weights, by name.
        boot: the run of the machine in which the bytes were written or last verified.
    """

    entries: Mapping[str, Entry]
    boot: str = dataclasses.field(default_factory=lambda: current_boot())

    @property
    def files(self) -> list[StoredFile]:
        """The files that hold weights, each once."""
        return list(dict.fromkeys(entry.file for entry in self.entries.values()))

    def dump(self) -> bytes:
        """As the bytes of the manifest's file."""
        numbers = {file: number for number, file in enumerate(self.files)}
        tensors = {
            name: {
                "file": numbers[entry.file],
                "offset": entry.offset,
                "dtype": str(entry.dtype).removeprefix("torch."),
                "shape": list(entry.shape),
                "content": entry.content,
                "checksum": entry.checksum,
            }
            for name, entry in self.entries.items()
        }
        data = {
            "format": _FORMAT,
            "version": _VERSION,
            "boot": self.boot,
            "files": [dataclasses.asdict(file) for file in numbers],
            "tensors": tensors,
        }
        return json.dumps({**data, "digest": _digest(data)}).encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a folder.

        Raises:
            FileNotFoundError: there is none, or not all of it (the machine stopped before its bytes
                were on the disk).
            OffloadStoreError: it cannot be read, is not a manifest, or contradicts itself.
        """
        path = folder / MANIFEST_NAME
        try:
            raw = read_bounded(path)
            if not raw.rstrip(b"\0").endswith(b"}"):
                raise FileNotFoundError(f"{path} is not complete")
            data = parse_json(raw, str(path), file_names=True)
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise _broken(path, f"its version is {data['version']!r}, {_VERSION} is supported")
            if data.pop("digest") != _digest(data):
                raise _broken(path, "it was changed after it was written")
            files = [_read_file(item, path) for item in data["files"]]
            entries = {
                name: _read_entry(name, item, files, path) for name, item in data["tensors"].items()
            }
            return cls(entries, str(data["boot"]))
        except (FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise OffloadStoreError(f"cannot read {path}: {error.strerror}") from None
        except CheckpointError as error:
            raise _broken(path, str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise _broken(path, f"{type(error).__name__}: {error!s:.200}") from None


def _digest(data: Mapping[str, Any]) -> str:
    """A digest of a whole manifest, so that any damage to it is noticed."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def _read_file(item: Any, manifest: Path) -> StoredFile:
    file = StoredFile(str(item["path"]), _natural(item["nbytes"]), _natural(item["mtime_ns"]))
    # What the store wrote is next to the manifest; what it points into has an absolute path.
    if not os.path.isabs(file.path) and (
        os.path.basename(file.path) != file.path or not file.path.startswith(DATA_PREFIX)
    ):
        raise _broken(manifest, f"the file {file.path!r} is not one that it can hold")
    return file


def _read_entry(name: str, item: Any, files: list[StoredFile], manifest: Path) -> Entry:
    dtype = getattr(torch, str(item["dtype"]), None)
    if not isinstance(dtype, torch.dtype) or not is_plain_dtype(dtype):
        raise _broken(manifest, f"{name!r:.200} has the dtype {item['dtype']!r:.50}")
    if not is_shape(item["shape"]):
        raise _broken(manifest, f"{name!r:.200} has the shape {item['shape']!r:.200}")
    file = files[_natural(item["file"])]
    written = None if item["checksum"] is None else str(item["checksum"])
    if (written is None) != os.path.isabs(file.path):
        raise _broken(manifest, f"{name!r:.200} has the checksum {written!r:.50}")
    offset, shape = _natural(item["offset"]), tuple(item["shape"])
    entry = Entry(file, offset, dtype, shape, str(item["content"]), written)
    if entry.offset + entry.nbytes > file.nbytes or entry.offset % dtype.itemsize:
        raise _broken(manifest, f"{name!r:.200} is not inside {file.path!r}")
    return entry


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.50} is not a size")
    return value


def _broken(manifest: Path, why: str) -> OffloadStoreError:
    return OffloadStoreError(
        f"{manifest} is not the manifest of an offload store: {why}. "
        f"Remove {manifest.parent}, or name another folder."
    )


def _again(folder: Path) -> str:
    return f"Offload the model again, with {folder} removed or to another folder."
