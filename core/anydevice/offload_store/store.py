"""The offload store: weights on disk, read lazily by name.

One read interface, a Mapping from name to host tensor, over three kinds of place: safetensors files
as they came (the store only points into them), large safetensors files that anydevice wrote, and
folders that the peer wrote (see `accelerate_format`). A tensor is a view of its file: reading it
costs nothing until its bytes are used.

[Note: when a store is complete]
The manifest is written last and renamed into place. So a folder without one is not a store, and a
file that the manifest does not name is not part of it: what a killed writer left is removed by the
next one. A file that is named is never written to again. Writers take turns by a lock on the
folder, which the system drops when its holder dies. Readers need no lock: whatever a manifest
names was in place before it. When the machine itself may have stopped, see `syncing`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import filelock
import torch

from anydevice.checkpoint.mapped import FileSlice, MappedFile, backing_of, is_unwritten, map_file
from anydevice.errors import AnyDeviceError, OffloadStoreError
from anydevice.offload_store.manifest import (
    LOCK_NAME,
    MANIFEST_NAME,
    Entry,
    Manifest,
    StoredFile,
    current_boot,
)
from anydevice.offload_store.syncing import publish, sync_later
from anydevice.offload_store.tensor_bytes import (
    Storable,
    WeightSource,
    checksum,
    is_checksum,
    require_storable,
)
from anydevice.offload_store.writing import (
    nothing_left_on_error,
    remove_data_files,
    write_files,
)

__all__ = ["OffloadStore", "WeightSource", "open_store", "write_store"]


class OffloadStore(Mapping[str, torch.Tensor]):
    """Weights that anydevice offloaded, by name. Made by `open_store` and `write_store`.

    Reading a name gives a host tensor that views its file; writing to that tensor never changes the
    file. Names that were tied when written give views of the same bytes.

    Attributes:
        folder: where the manifest is.
        manifest: what the store holds, and where.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder: Final = folder
        self.manifest: Final = manifest
        self._files: dict[str, MappedFile] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Map one weight.

        Raises:
            KeyError: there is none of that name.
            OffloadStoreError: its file is gone, or has changed.
        """
        entry = self.manifest.entries[name]
        path = entry.file.check(self.folder)
        file = self._files.get(str(path))
        if file is None:
            # A mapping of its own: two models on one folder must not see each other's writes.
            file = self._files.setdefault(str(path), map_file(path, own=True))
        return file.tensor(entry.offset, entry.dtype, entry.shape)

    def __contains__(self, name: object) -> bool:
        return name in self.manifest.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.manifest.entries)

    def __len__(self) -> int:
        return len(self.manifest.entries)

    def __repr__(self) -> str:
        return f"<OffloadStore {str(self.folder)!r}: {len(self)} weights>"

    @property
    def nbytes(self) -> int:
        """Bytes of all weights; tied ones count once."""
        places = {(e.file.path, e.offset): e.nbytes for e in self.manifest.entries.values()}
        return sum(places.values())

    def place_of(self, name: str) -> FileSlice:
        """Where the bytes of a weight are."""
        entry = self.manifest.entries[name]
        return FileSlice(str(self.folder / entry.file.path), entry.offset, entry.nbytes)


def open_store(folder: str | os.PathLike[str]) -> OffloadStore:
    """Open a folder that `write_store` completed.

    Raises:
        OffloadStoreError: it is not complete, or a file that it names is gone or has changed.
    """
    path = Path(folder).absolute()
    try:
        manifest = Manifest.read(path)
    except OSError:
        raise OffloadStoreError(
            f"{path} is not a complete offload store: it has no {MANIFEST_NAME}, or one that was "
            "not yet on the disk when the machine stopped (or that another machine is bringing to "
            "the disk now). Writing it was cut short, or it is another folder. Offload the model "
            "again."
        ) from None
    for file in manifest.files:
        file.check(path)
    return OffloadStore(path, manifest)


def write_store(
    folder: str | os.PathLike[str], tensors: Mapping[str, Storable], *, point: bool = True
) -> OffloadStore:
    """Store weights in a folder, or find them there already.

    What a complete store of the same model holds is reused, without writing; only what it lacks is
    added (another device map sends other weights to the disk). What an interrupted writer left is
    removed. On return the store is complete, also if this process is killed; a thread brings it to
    the disk, so that it lasts when the machine stops. If it raises, no new file is left.

    Args:
        folder: made when needed. One folder is for the weights of one model.
        tensors: name to tensor (on any device, of any strides and dtype), or to `WeightSource`.
        point: let the store point to the file of a tensor that is a view of one (a mapped
            checkpoint) and was not written to since, rather than copy it.

    Returns:
        A mapping of the names in ``tensors``.

    Raises:
        OffloadStoreError: the folder holds other weights, or a weight cannot be stored.
        DiskFullError: no room.
    """
    path = Path(folder).absolute()
    for name, value in tensors.items():
        require_storable(name, value)
    try:
        manifest = _usable(path, tensors)
        if not manifest.entries.keys() >= tensors.keys() or not (path / MANIFEST_NAME).exists():
            path.mkdir(parents=True, exist_ok=True)
            with filelock.FileLock(path / LOCK_NAME):
                # Another process may have written while this one waited: look once more.
                manifest = _add_missing(path, _usable(path, tensors), tensors, point)
        elif manifest.boot is not None:  # its writer may not have come to this
            sync_later(path, manifest)
    except OSError as error:
        if isinstance(error, AnyDeviceError):
            raise
        raise OffloadStoreError(f"cannot write to the offload folder {path}: {error}") from error
    return OffloadStore(path, Manifest({name: manifest.entries[name] for name in tensors}))


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
    # A store that is on the disk may be the only copy: it does not become less for a moment.
    boot = None if old.entries and old.boot is None else current_boot()
    with nothing_left_on_error(folder, kept, missing):
        manifest = Manifest(entries | write_files(folder, kept, missing), boot)
        publish(folder, manifest)
    return manifest


def _point_to(value: Storable) -> Entry | None:
    """An entry for a weight that need not be written; None for one that must."""
    place = _resting_place(value)
    if place is None:
        return None
    file = StoredFile.of(place.path)
    content = f"file:{file.path}:{file.nbytes}:{file.mtime_ns}:{place.offset}"
    return Entry(file, place.offset, value.dtype, tuple(value.shape), content)


def _resting_place(value: Storable) -> FileSlice | None:
    """The place of a tensor's bytes in the file that it views, if they are still the file's."""
    # Flags of lazy conjugation and negation say that the values are not the bytes.
    if isinstance(value, WeightSource) or value.is_conj() or value.is_neg():
        return None
    return backing_of(value) if is_unwritten(value) else None


# ---------------------------------------------------------------------- a store that is there


def _usable(folder: Path, tensors: Mapping[str, Storable]) -> Manifest:
    """What a folder holds of the same model and undamaged; nothing where there is no store yet.

    Raises:
        OffloadStoreError: the folder belongs to other weights.
    """
    try:
        manifest = Manifest.read(folder)
    except (FileNotFoundError, NotADirectoryError):
        return Manifest({})
    difference = _difference(OffloadStore(folder, manifest), tensors)
    if difference is not None:
        raise OffloadStoreError(
            f"the offload folder {folder} holds the weights of another model: {difference}. "
            "Remove it, or name another folder."
        )
    whole = {file for file in manifest.files if _is_whole(file, folder)}
    entries = {name: e for name, e in manifest.entries.items() if e.file in whole}
    return Manifest(entries, manifest.boot)


def _is_whole(file: StoredFile, folder: Path) -> bool:
    try:
        file.check(folder)
    except OffloadStoreError:
        return False
    return True


def _difference(store: OffloadStore, tensors: Mapping[str, Storable]) -> str | None:
    """What tells the store's model from that of ``tensors``; None when they can be one."""
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
        if not _same_content(store, name, value):
            return f"{name!r} has other values in the folder than in the model"
    return None


def _same_content(store: OffloadStore, name: str, value: Storable) -> bool:
    entry = store.manifest.entries[name]
    if isinstance(value, WeightSource) and value.identity == entry.content:
        return True
    if _resting_place(value) == store.place_of(name):
        return True
    if is_checksum(entry.content):
        return checksum(value) == entry.content
    try:
        return checksum(value) == checksum(store[name])
    except OffloadStoreError:  # what the store pointed to is gone, so nobody can tell
        return False
