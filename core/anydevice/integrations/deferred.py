"""Weights that another library loads: read from mapped files, and stored on the disk if need be."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import torch

from anydevice.checkpoint import open_checkpoint
from anydevice.checkpoint.mapped import is_unwritten
from anydevice.errors import ModelError
from anydevice.offload_store.manifest import MANIFEST_NAME
from anydevice.offload_store.store import open_store, require_folder, write_store
from anydevice.weights import exchange, find_slot

__all__ = ["DeferredWeights", "read_files"]

#: Bytes that wait in memory before they are written together.
_BATCH: Final = 256 << 20


def read_files(paths: Iterable[str]) -> dict[str, torch.Tensor]:
    """All tensors of some checkpoint files; those of safetensors files are views of the files."""
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        checkpoint = open_checkpoint(path)
        found |= {name: checkpoint.tensor(name) for name in checkpoint}
    return found


class DeferredWeights:
    """Weights of one model that are placed on the disk.

    One that is a view of its checkpoint file stays so. Another one (cast, joined from several, or
    quantized) is written to the offload folder, in batches of bounded size.

    Args:
        model: the model.
        folder: the offload folder; may be None where nothing has to be written.
    """

    def __init__(self, model: Any, folder: str | os.PathLike[str] | None) -> None:
        self.model = model
        self._folder = folder
        self._stored: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        if folder is not None and (require_folder(folder) / MANIFEST_NAME).exists():
            self._stored.update(open_store(folder))

    def add(self, name: str) -> None:
        """Take a weight that the model holds now.

        Raises:
            ModelError: it must be written, and there is no folder.
            OffloadStoreError: the folder cannot be used.
        """
        tensor = find_slot(self.model, name).get()
        if tensor is None or tensor.is_meta or is_unwritten(tensor):
            return
        if self._folder is None:
            raise ModelError(
                f"{name} is placed on the disk and is not in its checkpoint file as it is needed "
                "(it is cast, joined or quantized): give offload_folder, the folder to write it to"
            )
        self._waiting[name] = tensor.detach()
        if sum(value.nbytes for value in self._waiting.values()) >= _BATCH:
            self.store()

    def store(self) -> None:
        """Write what waits, and let the model hold views of what was written."""
        if not self._waiting or self._folder is None:
            return
        store = write_store(self._folder, self._stored | self._waiting)
        for name in self._waiting:
            self._stored[name] = store[name]
            exchange(find_slot(self.model, name), store[name])
        self._waiting.clear()
