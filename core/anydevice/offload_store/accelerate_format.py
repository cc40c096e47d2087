"""The reference's functions for offloaded weights, and Accelerate's format of a folder.

That format is a file ``NAME.dat`` of raw bytes for each weight, and an ``index.json`` that gives
its dtype and shape; or, for a weight that stays in a safetensors file, an entry
``{"safetensors_file", "weight_name", "dtype"}``. It is read, never written.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.file_identity import FileIdentity
from anydevice.checkpoint.index_file import inside
from anydevice.checkpoint.mapped import MappedFile, map_file
from anydevice.checkpoint.opening import open_checkpoint
from anydevice.checkpoint.strict_json import parse_json, read_bounded
from anydevice.devices import DeviceLike, parse_device
from anydevice.errors import CheckpointError, OffloadStoreError
from anydevice.offload_store.manifest import MANIFEST_NAME
from anydevice.offload_store.store import OffloadStore, open_store, write_store
from anydevice.offload_store.weight_files import read_dtype, read_shape, view_file
from anydevice.tensors import move_tensor
from anydevice.weights import exchange, find_slot

__all__ = ["OffloadedWeightsLoader", "load_offloaded_weights", "offload_state_dict"]

_INDEX: Final = "index.json"


def offload_state_dict(
    save_dir: str | os.PathLike[str], state_dict: Mapping[str, torch.Tensor]
) -> None:
    """Write all tensors of a state dict to a folder, as an offload store that needs no other file.

    Args:
        save_dir: the folder; made when needed.
        state_dict: name to tensor.

    Raises:
        OffloadStoreError: the folder holds other weights, or a tensor cannot be stored.
        DiskFullError: the disk is full.

    Example:
        >>> import torch
        >>> from anydevice.utils import OffloadedWeightsLoader, offload_state_dict
        >>> offload_state_dict("offload", {"x": torch.ones(2)})
        >>> OffloadedWeightsLoader(save_folder="offload")["x"]
        tensor([1., 1.])
    """
    write_store(save_dir, state_dict, point=False)


def load_offloaded_weights(
    model: nn.Module, index: Mapping[str, Any] | None, offload_folder: str | os.PathLike[str]
) -> None:
    """Give a model's parameters and buffers the values that were offloaded to a folder.

    They become views of their files on the host. A Parameter stays the same object.

    Args:
        model: the model, on any device, meta too.
        index: the names to load; its values say where each is (Accelerate's format), or are ignored
            when the folder is anydevice's own. None or empty: nothing is loaded.
        offload_folder: the folder.

    Raises:
        ModelError: the model has no such name.
        OffloadStoreError: a weight is not there, or has another shape.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import load_offloaded_weights, offload_weight
        >>> model = nn.Linear(2, 2, bias=False)
        >>> index = offload_weight(model.weight.detach() + 1, "weight", ".", index={})
        >>> load_offloaded_weights(model, index, ".")
    """
    if not index:
        return
    weights = OffloadedWeightsLoader(save_folder=offload_folder, index=index)
    found = {}
    for name in index:
        slot, value = find_slot(model, name), weights[name]
        old = slot.get()
        if old is not None and old.shape != value.shape:
            raise OffloadStoreError(
                f"{name} has shape {tuple(value.shape)} in {offload_folder}, and "
                f"{tuple(old.shape)} in the model"
            )
        found[slot] = value
    for slot, value in found.items():
        exchange(slot, value)


class OffloadedWeightsLoader(Mapping[str, torch.Tensor]):
    """Weights in memory and in an offload folder as one mapping, read lazily.

    Args:
        state_dict: weights in memory; they come first.
        save_folder: an offload folder, anydevice's own or Accelerate's.
        index: the names in the folder, as Accelerate's ``index.json`` has them; by default all that
            the folder holds.
        device: where tensors are wanted; by default those in memory are given as they are, and
            those on disk on the host.

    Raises:
        OffloadStoreError: the folder has no index, and none is given.

    Example:
        >>> import torch
        >>> from anydevice.utils import OffloadedWeightsLoader, offload_state_dict
        >>> offload_state_dict("offload", {"a": torch.ones(2)})
        >>> weights = OffloadedWeightsLoader({"b": torch.zeros(1)}, save_folder="offload")
        >>> sorted(weights), weights["a"]
        (['a', 'b'], tensor([1., 1.]))
    """

    def __init__(
        self,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        save_folder: str | os.PathLike[str] | None = None,
        index: Mapping[str, Any] | None = None,
        device: DeviceLike | None = None,
    ) -> None:
        if state_dict is None and save_folder is None and index is None:
            raise OffloadStoreError("give a state dict, an offload folder, or an index")
        self.state_dict: Mapping[str, torch.Tensor] = {} if state_dict is None else state_dict
        self.save_folder = None if save_folder is None else Path(save_folder).absolute()
        self.index: Mapping[str, Any] = _find_index(self.save_folder) if index is None else index
        self.device = None if device is None else parse_device(device)
        # A dict, not a list: a name that is in both is found in constant time.
        self._names = dict.fromkeys([*self.state_dict, *self.index])
        self._store: OffloadStore | None = None
        self._checkpoints: dict[str, Checkpoint] = {}
        self._files: dict[str, MappedFile] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return one weight.

        Raises:
            KeyError: there is none of that name.
            OffloadStoreError: it is not where the index says.
        """
        value = self.state_dict[name] if name in self.state_dict else self._read(name)
        return value if self.device is None else move_tensor(value, self.device)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def _read(self, name: str) -> torch.Tensor:
        item = self.index[name]
        try:
            if isinstance(item, Mapping) and item.get("safetensors_file") is not None:
                return self._read_safetensors(name, item)
            if self.save_folder is None:
                raise OffloadStoreError(f"{name} is in an offload folder, and none is given")
            if self._store is None and os.path.lexists(self.save_folder / MANIFEST_NAME):
                self._store = open_store(self.save_folder)
            if self._store is not None and name in self._store:
                return self._store[name]
            return self._read_dat(self.save_folder, name, item)
        except CheckpointError as error:
            raise OffloadStoreError(f"cannot read the offloaded weight {name}: {error}") from error

    def _read_safetensors(self, name: str, item: Mapping[str, Any]) -> torch.Tensor:
        """Map a weight that stayed in its checkpoint."""
        file, key = str(item["safetensors_file"]), str(item.get("weight_name", name))
        checkpoint = self._checkpoints.get(file)
        if checkpoint is None:
            FileIdentity.of(file)  # a file that is here: an index is not to name what to download
            checkpoint = self._checkpoints[file] = open_checkpoint(file)
        checkpoint.check()
        if key not in checkpoint:
            raise OffloadStoreError(
                f"{file} has no weight {key!r}, which the index gives for {name!r}"
            )
        tensor = checkpoint.tensor(key)
        if item.get("dtype") is None:
            return tensor
        dtype = read_dtype(name, item)
        try:
            return tensor.to(dtype)
        except RuntimeError as error:
            raise OffloadStoreError(
                f"{name} of {file} has {tensor.dtype}, and torch cannot make {dtype} of it: "
                f"{error!s:.200}"
            ) from error

    def _read_dat(self, folder: Path, name: str, item: Any) -> torch.Tensor:
        """Map one of Accelerate's raw files."""
        dtype, shape = read_dtype(name, item), read_shape(name, item)
        if name.startswith("..") or Path(name).name != name:
            raise OffloadStoreError(f"the weight {name!r:.200} would be read from outside {folder}")
        if not math.prod(shape):
            return torch.empty(shape, dtype=dtype)
        path = inside(str(folder), f"{name}.dat", f"{folder} has")
        file = self._files.get(path)
        if file is None:
            # A mapping of its own: two models on one folder must not see each other's writes.
            file = self._files[path] = map_file(path, own=True)
        file.check()
        return view_file(file, dtype, shape)


def _find_index(folder: Path | None) -> Mapping[str, Any]:
    if folder is None:
        return {}
    if os.path.lexists(folder / MANIFEST_NAME):
        return dict.fromkeys(open_store(folder))
    path = folder / _INDEX
    try:
        return parse_json(read_bounded(path), str(path))
    except FileNotFoundError as error:
        raise OffloadStoreError(
            f"{folder} is not an offload folder: it has no {MANIFEST_NAME} and no {_INDEX} "
            f"({error.strerror})"
        ) from None
    except OSError as error:
        raise OffloadStoreError(f"cannot read {path}: {error.strerror}") from None
    except CheckpointError as error:
        raise OffloadStoreError(f"not an offload folder's index: {error}") from None
