"""What an offload folder holds already: whether it is of the same model, and undamaged."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

import filelock

from anydevice.checkpoint.file_identity import FileSlice
from anydevice.checkpoint.mapped import backing_of, is_unwritten
from anydevice.errors import OffloadStoreError
from anydevice.interrupts import check
from anydevice.offload_store.manifest import (
    LOCK_NAME,
    MANIFEST_NAME,
    Manifest,
    StoredFile,
    current_boot,
)
from anydevice.offload_store.mapping import OffloadStore
from anydevice.offload_store.tensor_bytes import Storable, WeightSource, checksum
from anydevice.offload_store.writing import write_atomically

__all__ = ["find_damaged", "find_usable", "place_in_file"]


def find_usable(folder: Path, tensors: Mapping[str, Storable]) -> Manifest:
    """What a folder holds of the same model and undamaged; nothing where there is no store yet.

    Raises:
        OffloadStoreError: the folder belongs to other weights.
    """
    try:
        manifest = Manifest.read(folder)
    except (FileNotFoundError, NotADirectoryError):
        return Manifest({})
    whole = {file for file in manifest.files if _is_whole(file, folder)}
    entries = {name: e for name, e in manifest.entries.items() if e.file in whole}
    damaged = find_damaged(folder, Manifest(entries, manifest.boot))
    entries = {name: entry for name, entry in entries.items() if name not in damaged}
    difference = _difference(OffloadStore(folder, manifest), tensors)
    if difference is not None:
        raise OffloadStoreError(
            f"the offload folder {folder} holds the weights of another model: {difference}. "
            "Remove it, or name another folder."
        )
    return Manifest(entries)


def _is_whole(file: StoredFile, folder: Path) -> bool:
    try:
        file.check(folder)
    except OffloadStoreError:
        return False
    return True


def find_damaged(folder: Path, manifest: Manifest) -> set[str]:
    """The weights whose bytes are not those that were written; looked at once in each boot."""
    if manifest.boot == current_boot():
        return set()
    store, damaged = OffloadStore(folder, manifest), set()
    known: dict[tuple[str, int, int], str] = {}  # tied weights are read once
    for name, entry in store.manifest.entries.items():
        if entry.checksum is not None:
            check()
            place = (entry.file.path, entry.offset, entry.nbytes)
            if place not in known:
                known[place] = checksum(store[name])
            if known[place] != entry.checksum:
                damaged.add(name)
    if not damaged:
        _note_verified(folder, manifest)
    return damaged


def _note_verified(folder: Path, manifest: Manifest) -> None:
    """Name this boot in the folder's manifest, if it is this one and can be written to now."""
    lock = filelock.FileLock(folder / LOCK_NAME)
    with contextlib.suppress(OSError, filelock.Timeout), lock.acquire(timeout=0):
        if (folder / MANIFEST_NAME).read_bytes() == manifest.dump():
            write_atomically(folder / MANIFEST_NAME, Manifest(manifest.entries).dump())


def _difference(store: OffloadStore, tensors: Mapping[str, Storable]) -> str | None:
    """How the store's model differs from that of ``tensors``; None when they can be the same."""
    entries = store.manifest.entries
    common = {name: value for name, value in tensors.items() if name in entries}
    if entries and tensors and not common:
        return f"it has no {next(iter(tensors))!r}, nor any other weight of this model"
    for name, value in common.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (value.dtype, tuple(value.shape)):
            return (
                f"{name!r} is {entry.dtype} {entry.shape} in the folder, and {value.dtype} "
                f"{tuple(value.shape)} in the model"
            )
    for name, value in common.items():
        check()
        if not _same_content(store, name, value):
            return f"{name!r} has other values in the folder than in the model"
    return None


def _same_content(store: OffloadStore, name: str, value: Storable) -> bool:
    entry = store.manifest.entries[name]
    if isinstance(value, WeightSource) and value.identity == entry.content:
        return True
    if place_in_file(value) == store.place_of(name):
        return True
    if entry.checksum is not None:
        return checksum(value) == entry.checksum
    try:
        return checksum(value) == checksum(store[name])
    except OffloadStoreError:  # the file is gone, so they cannot be compared
        return False


def place_in_file(value: Storable) -> FileSlice | None:
    """The place of a tensor's bytes in the file that it views, if they are still the file's."""
    # Flags of lazy conjugation and negation say that the values are not the bytes.
    if isinstance(value, WeightSource) or value.is_conj() or value.is_neg():
        return None
    return backing_of(value) if is_unwritten(value) else None
