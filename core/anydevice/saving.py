"""Saving from one of several processes, and loading without running code from the file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from anydevice.errors import OptionError
from anydevice.processes import PartialState
from anydevice.tensors import send_to_device

__all__ = ["clean_state_dict_for_safetensors", "load", "replacing", "save"]


def save(
    obj: Any, f: Any, save_on_each_node: bool = False, safe_serialization: bool = False
) -> None:
    """Save from process 0 only. Use it in place of `torch.save`.

    Args:
        obj: what to save.
        f: a path, whose file is replaced when all is written; or a file open for writing.
        save_on_each_node: save from process 0 of each machine.
        safe_serialization: write safetensors: ``obj`` is a mapping of names to tensors.

    Raises:
        OptionError: ``safe_serialization`` of something else, or to an open file.

    Example:
        >>> import torch
        >>> from anydevice.utils import load, save
        >>> save({"x": torch.ones(1)}, "model.safetensors", safe_serialization=True)
        >>> load("model.safetensors")
        {'x': tensor([1.])}
    """
    state = PartialState()
    if safe_serialization:
        if not isinstance(f, (str, os.PathLike)):
            raise OptionError("safe_serialization=True writes to a path, not to an open file")
        if not isinstance(obj, Mapping) or not all(
            isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in obj.items()
        ):
            raise OptionError(
                "safe_serialization=True is for a mapping of names to tensors, such as a state "
                f"dict, and not for {type(obj).__name__} with other values: use "
                "safe_serialization=False"
            )
    if not (state.is_local_main_process if save_on_each_node else state.is_main_process):
        return
    if not isinstance(f, (str, os.PathLike)):
        torch.save(obj, f)
        return
    with replacing(Path(f)) as path:
        if safe_serialization:
            tensors = clean_state_dict_for_safetensors(send_to_device(dict(obj), "cpu"))
            save_file(tensors, path, metadata={"format": "pt"})
        else:
            torch.save(obj, path)


def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
    """Load what `save` or `torch.save` wrote, tensors and plain data only.

    Numpy's arrays are plain data here. Other objects can run code when they are loaded: give
    ``weights_only=False`` for a file that you trust.

    Args:
        f: a path or open file.
        map_location: where tensors go, as in `torch.load`.
        **kwargs: of `torch.load`.

    Example:
        >>> import torch
        >>> from anydevice.utils import load, save
        >>> save({"x": torch.ones(1)}, "weights.bin")
        >>> load("weights.bin")
        {'x': tensor([1.])}
    """
    if not kwargs.setdefault("weights_only", True):
        return torch.load(f, map_location=map_location, **kwargs)
    with torch.serialization.safe_globals(_numpy_types()):
        return torch.load(f, map_location=map_location, **kwargs)


def clean_state_dict_for_safetensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict that safetensors can hold: tensors that share memory once, all contiguous.

    Args:
        state_dict: names to tensors.

    Example:
        >>> import torch
        >>> from anydevice.utils import clean_state_dict_for_safetensors
        >>> shared = torch.ones(2)
        >>> len(clean_state_dict_for_safetensors({"a": shared, "b": shared}))
        1
    """
    found: dict[str, Any] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor):
            place = (value.untyped_storage().data_ptr(), value.storage_offset())
            key = (*place, value.shape, value.stride(), value.device)
            if value.numel() and value.device.type != "meta" and key in seen:
                continue  # the same tensor under another name
            seen.add(key)
            value = value.contiguous()
            if value.numel() and value.untyped_storage().nbytes() != value.nbytes:
                value = value.clone()  # a part of another's memory
        found[name] = value
    return found


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path next to ``path`` that takes its place when all went well."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    written = Path(name)
    try:
        yield written
        umask = os.umask(0)
        os.umask(umask)
        written.chmod(0o666 & ~umask)
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def _numpy_types() -> list[Any]:
    try:
        import numpy
    except ImportError:
        return []
    core = getattr(numpy, "_core", None) or numpy.core
    dtypes = [getattr(numpy.dtypes, name) for name in dir(numpy.dtypes) if name.endswith("DType")]
    return [core.multiarray._reconstruct, numpy.ndarray, numpy.dtype, *dtypes]
