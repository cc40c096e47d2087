"""The offload store: weights on disk, read lazily by name.

One read interface, a Mapping from name to host tensor, over safetensors files of a checkpoint (the
store only points into them), large safetensors files that anydevice wrote, and folders that
Accelerate wrote (see `accelerate_format`). A tensor is a view of its file: reading it costs nothing
until its bytes are used.

[Note: when a store is complete]
The manifest is written last and renamed into place. So a folder without one is not a store, and a
file that the manifest does not name is not part of it: what a killed writer left is removed by the
next one. A file that is named is never written to again. Writers take turns by a lock on the
folder, which the system drops when its holder dies. Readers need no lock: whatever a manifest
names was in place before it.

[Note: when the machine stops]
Nothing waits for the disk: what was written is in the system's memory, where every process finds
it. Only when the machine itself stops can bytes be lost. So the manifest names the boot in which it
was written, and in any other boot the weights are compared with their checksums before they are
used. What is damaged is refused, and written again by the next writer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import filelock
import torch

from anydevice.devices import synchronize
from anydevice.errors import AnyDeviceError, OffloadStoreError, OptionError
from anydevice.interrupts import check, uninterrupted
from anydevice.offload_store.manifest import (
    LOCK_NAME,
    MANIFEST_NAME,
    Entry,
    Manifest,
    StoredFile,
)
from anydevice.offload_store.mapping import OffloadStore
from anydevice.offload_store.reuse import find_damaged, find_usable, place_in_file
from anydevice.offload_store.tensor_bytes import Storable, WeightSource, require_storable
from anydevice.offload_store.writing import (
    nothing_left_on_error,
    remove_data_files,
    write_atomically,
    write_files,
)

__all__ = ["OffloadStore", "WeightSource", "open_store", "require_folder", "write_store"]

#: Seconds after which a writer that waits for another one looks whether it was interrupted.
_LOOK: Final = 0.2


def open_store(folder: str | os.PathLike[str]) -> OffloadStore:
    """Open a folder that `write_store` completed.

    Raises:
        OptionError: the folder's name is empty.
        OffloadStoreError: the folder is not complete, or a file that it names is gone, has changed
            or was damaged when the machine stopped.

    Example:
        >>> import torch
        >>> from anydevice.offload_store import open_store, write_store
        >>> _ = write_store("offload", {"x": torch.ones(2)})
        >>> open_store("offload")["x"]  # a view of the file
        tensor([1., 1.])
    """
    path = require_folder(folder)
    try:
        manifest = Manifest.read(path)
    except OSError:
        raise OffloadStoreError(
            f"{path} is not a complete offload store: it has no {MANIFEST_NAME}, or one that lost "
            "bytes when the machine stopped. Writing it was interrupted, or it is another folder. "
            "Offload the model again."
        ) from None
    for file in manifest.files:
        file.check(path)
    damaged = uninterrupted(lambda: find_damaged(path, manifest))
    if damaged:
        raise OffloadStoreError(
            f"the offload store {path} is damaged: {len(damaged)} weights, {min(damaged)!r} among "
            "them, differ from their checksums, since the machine stopped before they were on the "
            "disk. Offload the model again."
        )
    return OffloadStore(path, manifest)


def write_store(
    folder: str | os.PathLike[str], tensors: Mapping[str, Storable], *, point: bool = True
) -> OffloadStore:
    """Store weights in a folder, or find them there already.

    What a complete store of the same model holds is reused, without writing; only what it lacks is
    added (another device map sends other weights to the disk). What an interrupted writer left is
    removed. If it raises, no new file is left.

    Args:
        folder: made when needed. One folder is for the weights of one model.
        tensors: name to tensor (on any device, of any strides and dtype), or to `WeightSource`.
        point: let the store point to the file of a tensor that is a view of one (a mapped
            checkpoint) and was not written to since, rather than copy it.

    Returns:
        A mapping of the names in ``tensors``.

    Raises:
        OptionError: the folder's name is empty.
        OffloadStoreError: the folder holds other weights, or a weight cannot be stored.
        DiskFullError: the disk is full, or a limit of the system is reached.

    Example:
        >>> from torch import nn
        >>> from anydevice.offload_store import write_store
        >>> store = write_store("offload", nn.Linear(2, 3).state_dict())
        >>> store["weight"].shape  # a view of the file
        torch.Size([3, 2])
    """
    path = require_folder(folder)
    for name, value in tensors.items():
        require_storable(name, value)
    synchronize(v.device for v in tensors.values() if isinstance(v, torch.Tensor))
    manifest = uninterrupted(lambda: _find_or_write(path, tensors, point))
    return OffloadStore(path, Manifest({name: manifest.entries[name] for name in tensors}))


def require_folder(folder: str | os.PathLike[str]) -> Path:
    """The absolute path of an offload folder.

    Raises:
        OptionError: it is empty, which would mean the working directory, or no path.
    """
    try:
        text = os.fsdecode(folder)
    except TypeError:
        raise OptionError(f"the offload folder {folder!r} is not a path") from None
    if not text:
        raise OptionError("the offload folder is an empty string: name a folder, such as 'offload'")
    return Path(text).absolute()


def _find_or_write(folder: Path, tensors: Mapping[str, Storable], point: bool) -> Manifest:
    try:
        manifest = find_usable(folder, tensors)
        if manifest.entries.keys() >= tensors.keys() and (folder / MANIFEST_NAME).exists():
            return manifest
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder):
            # Another process may have written while this one waited: look once more.
            return _add_missing(folder, find_usable(folder, tensors), tensors, point)
    except OSError as error:
        if isinstance(error, AnyDeviceError):
            raise
        raise OffloadStoreError(f"cannot write to the offload folder {folder}: {error}") from error


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    lock = filelock.FileLock(folder / LOCK_NAME)
    while not lock.is_locked:
        check()
        with contextlib.suppress(filelock.Timeout):
            lock.acquire(timeout=_LOOK)
    try:
        yield
    finally:
        lock.release()


def _add_missing(
    folder: Path, old: Manifest, tensors: Mapping[str, Storable], point: bool
) -> Manifest:
    """Store the tensors that ``old`` lacks, under new file names; then name all in the manifest."""
    entries = dict(old.entries)
    kept = {file.path for file in old.files}
    remove_data_files(folder, kept)
    for name, value in tensors.items():
        if name not in entries and point and (entry := _point_to(value)) is not None:
            entries[name] = entry
    missing = {name: value for name, value in tensors.items() if name not in entries}
    with nothing_left_on_error(folder, kept, missing):
        manifest = Manifest(entries | write_files(folder, kept, missing))
        write_atomically(folder / MANIFEST_NAME, manifest.dump())
    return manifest


def _point_to(value: Storable) -> Entry | None:
    """An entry for a weight that need not be written; None for one that must."""
    place = place_in_file(value)
    if place is None:
        return None
    file = StoredFile.of(place.path)
    content = f"file:{file.path}:{file.nbytes}:{file.mtime_ns}:{place.offset}"
    return Entry(file, place.offset, value.dtype, tuple(value.shape), content)
