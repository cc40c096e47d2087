"""One weight a file, as the reference's functions have them: ``NAME.dat`` and ``index.json``.

For a whole state dict use `anydevice.offload_store.write_store`, which is verified and atomic.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from anydevice.checkpoint.mapped import MappedFile, map_file
from anydevice.errors import ModelError, OffloadStoreError
from anydevice.modules import as_dtype
from anydevice.offload_store.tensor_bytes import is_plain_dtype, is_shape
from anydevice.tensors import memory_of

__all__ = [
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_weight",
    "read_dtype",
    "read_shape",
    "save_offload_index",
    "view_file",
]


def offload_weight(
    weight: torch.Tensor,
    weight_name: str,
    offload_folder: str | os.PathLike[str],
    index: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write one weight to a folder.

    Args:
        weight: on any device.
        weight_name: names the file, ``NAME.dat``.
        offload_folder: is there already.
        index: where dtype and shape are added; a new dict by default.

    Returns:
        The index.

    Raises:
        OffloadStoreError: the dtype has no plain bytes, or the name leaves the folder.
        OSError: the file cannot be written.

    Example:
        >>> import torch
        >>> from anydevice.utils import offload_weight
        >>> offload_weight(torch.ones(2), "weight", ".", index={})
        {'weight': {'dtype': 'float32', 'shape': [2]}}
    """
    index = {} if index is None else index
    path = Path(offload_folder, f"{weight_name}.dat")
    if path.parent != Path(offload_folder):
        raise OffloadStoreError(f"the weight's name {weight_name!r} leads out of the folder")
    if not is_plain_dtype(weight.dtype):
        raise OffloadStoreError(f"{weight_name}: {weight.dtype} has no plain bytes to write")
    path.write_bytes(memory_of(weight.detach().cpu().contiguous()))
    index[weight_name] = {
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    return index


def load_offloaded_weight(
    weight_file: str | os.PathLike[str], weight_info: Mapping[str, Any]
) -> torch.Tensor:
    """Map a weight's file into memory; it is read when it is used, and writing changes no file.

    Args:
        weight_file: a file that `offload_weight` wrote.
        weight_info: its entry in the index: ``"dtype"`` and ``"shape"``.

    Raises:
        OffloadStoreError: the entry cannot be read, or the file has another size.
        CheckpointNotFoundError: the file cannot be opened.

    Example:
        >>> import torch
        >>> from anydevice.utils import load_offloaded_weight, offload_weight
        >>> index = offload_weight(torch.ones(2), "weight", ".", index={})
        >>> load_offloaded_weight("weight.dat", index["weight"])
        tensor([1., 1.])
    """
    dtype, shape = read_dtype(str(weight_file), weight_info), read_shape(weight_file, weight_info)
    return view_file(map_file(weight_file, own=True), dtype, shape)


def read_dtype(name: str, info: Any) -> torch.dtype:
    """The dtype that an index gives for a weight.

    Raises:
        OffloadStoreError: it gives none that has plain bytes.
    """
    try:
        dtype = as_dtype(info["dtype"])
    except (LookupError, TypeError, ModelError):
        dtype = None
    if dtype is None or not is_plain_dtype(dtype):
        raise OffloadStoreError(
            f"the index has no dtype that can be read for {name!r:.200}: {info!r:.200}"
        )
    return dtype


def read_shape(name: str | os.PathLike[str], info: Any) -> list[int]:
    """The shape that an index gives for a weight.

    Raises:
        OffloadStoreError: it gives none.
    """
    shape = info.get("shape")
    shape = list(shape) if isinstance(shape, tuple) else shape
    if not is_shape(shape):
        raise OffloadStoreError(f"the index gives the shape {shape!r:.200} for {name!r:.200}")
    return shape


def view_file(file: MappedFile, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    """A file of raw bytes as a tensor.

    Raises:
        OffloadStoreError: it has another size.
    """
    # Accelerate gives a single number an array of one element, and records its shape as empty.
    nbytes = math.prod(shape) * dtype.itemsize
    if file.nbytes != nbytes:
        raise OffloadStoreError(
            f"{file.path} has {file.nbytes} bytes; {dtype} {tuple(shape)!s:.200} takes {nbytes}. "
            "It was cut short, or is another model's."
        )
    return file.tensor(0, dtype, shape)


def save_offload_index(index: Mapping[str, Any], offload_folder: str | os.PathLike[str]) -> None:
    """Write ``index.json``, added to what is there; without an index nothing is written.

    Args:
        index: what `offload_weight` returned.
        offload_folder: where the weights are.

    Raises:
        OffloadStoreError: the index that is there cannot be read.

    Example:
        >>> import torch
        >>> from anydevice.utils import offload_weight, save_offload_index
        >>> index = offload_weight(torch.ones(2), "weight", ".", index={})
        >>> save_offload_index(index, ".")
    """
    if not index:
        return
    path = Path(offload_folder, "index.json")
    found: dict[str, Any] = {}
    if path.is_file():
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise OffloadStoreError(f"{path} is no index of weights: {error}") from error
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_text(json.dumps({**found, **index}, indent=2), encoding="utf-8")
    written.replace(path)


def extract_submodules_state_dict(
    state_dict: Mapping[str, torch.Tensor], submodule_names: Iterable[str]
) -> dict[str, torch.Tensor]:
    """The part of a state dict that belongs to some submodules, under its full names.

    Args:
        state_dict: name to tensor.
        submodule_names: such as ``["encoder", "head"]``; a tensor's own name counts, too.

    Example:
        >>> from anydevice.utils import extract_submodules_state_dict
        >>> sorted(extract_submodules_state_dict({"a.w": 1, "ab.w": 2, "a": 3}, ["a"]))
        ['a', 'a.w']
    """
    names = list(submodule_names)
    return {
        key: value
        for key, value in state_dict.items()
        if any(key == name or key.startswith(f"{name}.") for name in names)
    }
