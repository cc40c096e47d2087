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

from anydevice.errors import ModelError, OffloadStoreError
from anydevice.modules import as_dtype
from anydevice.offload_store.tensor_bytes import bytes_of, is_plain_dtype, is_shape

__all__ = [
    "extract_submodules_state_dict",
    "load_offloaded_weight",
    "offload_weight",
    "save_offload_index",
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
    path.write_bytes(bytes_of(weight.detach().cpu().contiguous()))
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

    Example:
        >>> import torch
        >>> from anydevice.utils import load_offloaded_weight, offload_weight
        >>> index = offload_weight(torch.ones(2), "weight", ".", index={})
        >>> load_offloaded_weight("weight.dat", index["weight"])
        tensor([1., 1.])
    """
    try:
        dtype, shape = as_dtype(weight_info["dtype"]), list(weight_info["shape"])
    except (LookupError, TypeError, ModelError) as error:
        raise OffloadStoreError(f"{weight_file}: no dtype and shape in {weight_info!r}") from error
    if not is_plain_dtype(dtype) or not is_shape(shape):
        raise OffloadStoreError(f"{weight_file}: {weight_info!r} is no dtype and shape")
    count, size = math.prod(shape), Path(weight_file).stat().st_size
    if size != count * dtype.itemsize:
        raise OffloadStoreError(
            f"{weight_file} has {size} bytes; {dtype} {shape} takes {count * dtype.itemsize}"
        )
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    data = torch.from_file(str(weight_file), shared=False, size=size, dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


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
