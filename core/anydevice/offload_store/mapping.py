"""Weights of an offload folder as a mapping: each is a view of its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import torch

from anydevice.checkpoint.file_identity import FileSlice
from anydevice.checkpoint.mapped import MappedFile, map_file
from anydevice.offload_store.manifest import Manifest

__all__ = ["OffloadStore"]


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
