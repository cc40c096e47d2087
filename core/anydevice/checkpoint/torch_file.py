"""Files of `torch.save`: never run code from them, never copy what can be mapped.

Both formats are read: the zip archive, whose tensors are mapped, and the older one, a run of
pickles and bytes, which torch reads into memory.
"""

from __future__ import annotations

import pickle
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

import torch

from anydevice.checkpoint.file_identity import FileIdentity
from anydevice.checkpoint.mapped import map_file
from anydevice.checkpoint.torch_archive import Archive, noting_storages
from anydevice.errors import CorruptCheckpointError, UnsafeCheckpointError
from anydevice.tensors import PLAIN_TYPES

__all__ = ["looks_like_torch", "read_torch_file", "state_dict_of"]

_ZIP: Final = b"PK\x03\x04"
_PICKLE: Final = b"\x80"
#: Words of torch's messages when a pickle asks for more than plain data.
_CODE_WORDS: Final = (
    "global",
    "reduce",
    "unsupported class",
    "can only",
    "persistent_load",
    "torchscript",
)
#: What torch's messages ask for by name, and how their lines of advice begin.
_GLOBAL: Final = re.compile(r"GLOBAL (\S+)")
_IMPORT: Final = re.compile(r"\S+ must be imported to load .+")
_ADVICE: Final = ("Weights only load failed", "Please file an issue", "Check the documentation")


def looks_like_torch(start: bytes) -> bool:
    """Whether a file's first bytes are those of a file of `torch.save`."""
    return start.startswith((_ZIP, _PICKLE))


def read_torch_file(path: str) -> Any:
    """Load what was saved, tensors on the host, without running code from the file.

    Raises:
        CheckpointNotFoundError: no such file.
        CorruptCheckpointError: it is damaged, or not a file of torch.
        UnsafeCheckpointError: it holds more than tensors and plain data.
    """
    if FileIdentity.of(path).size == 0:
        raise CorruptCheckpointError(f"{path} is empty. Fetch it again, or save it again.")
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    archive = Archive.read(path) if is_zip else None
    storages: list[tuple[int, int]] = []
    try:
        with warnings.catch_warnings(), noting_storages(storages):
            warnings.simplefilter("ignore")  # TypedStorage, and hints that the errors below give
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
    except Exception as error:  # a damaged pickle can fail in any way
        raise _refusal(path, error) from error
    if archive is None or not storages:
        return loaded
    start = archive.start_in_memory(storages)
    return _mapped_anew(path, loaded, start) if archive.is_native else loaded


def state_dict_of(loaded: Any, path: str) -> dict[str, Any]:
    """The state dict in what `read_torch_file` gave: itself, or its entry ``"state_dict"``.

    Raises:
        CorruptCheckpointError: there is none; the message says what there is.
    """
    if isinstance(loaded, Mapping) and not any(map(_is_tensor, loaded.values())):
        inner = loaded.get("state_dict")
        loaded = inner if isinstance(inner, Mapping) else loaded
    if isinstance(loaded, Mapping) and all(isinstance(key, str) for key in loaded):
        nested = [
            k
            for k, v in loaded.items()
            if isinstance(v, Mapping) and any(map(_is_tensor, v.values()))
        ]
        if any(map(_is_tensor, loaded.values())) or not nested:
            _require_shapes(loaded, path)
            return dict(loaded)
        raise CorruptCheckpointError(
            f"{path} is not a state dict; it holds several things, among them mappings with "
            f"tensors under {', '.join(map(repr, nested))}. Save the one you want by itself: "
            f"torch.save(torch.load({path!r})[{nested[0]!r}], ...)."
        )
    raise CorruptCheckpointError(
        f"{path} holds a {type(loaded).__name__}, not a state dict (names to tensors). "
        "Save model.state_dict() in its place."
    )


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _require_shapes(state: Mapping[str, Any], path: str) -> None:
    for name, value in state.items():
        if _is_tensor(value) and value.is_nested and value.layout is torch.strided:
            raise CorruptCheckpointError(
                f"{path} has the nested tensor {name!r:.200}, which has no shape. Save its parts "
                "by names of their own."
            )


def _refusal(path: str, error: Exception) -> Exception:
    text = str(error)
    words = text.lower()
    if isinstance(error, (pickle.UnpicklingError, RuntimeError)) and any(
        w in words for w in _CODE_WORDS
    ):
        asked = _GLOBAL.search(text)
        reason = f"it asks for {asked[1]:.200}" if asked else "it calls what makes no tensor"
        return UnsafeCheckpointError(
            f"{path} holds more than tensors and plain data, and reading it would run code from it "
            f"({reason}). If you trust it, load it yourself with torch.load(..., "
            "weights_only=False) and save the tensors with safetensors.torch.save_file; or allow "
            "its classes with torch.serialization.add_safe_globals."
        )
    missing = _IMPORT.search(text)
    if missing:
        return CorruptCheckpointError(f"{path} cannot be read yet: {missing[0]:.200}")
    # Torch's advice is left out: it is to run the file's code.
    lines = [line.strip() for line in text.splitlines()]
    reasons = [line for line in lines if line and not line.startswith(_ADVICE)]
    reason = reasons[0].rstrip(".") if reasons else "it ends too early"
    return CorruptCheckpointError(
        f"{path} cannot be read as a file of torch.save: {type(error).__name__}: {reason:.300}. "
        "Fetch it again, or save it again."
    )


def _mapped_anew(path: str, loaded: Any, start: int) -> Any:
    """Replace tensors of torch's mapping by views of ours, whose file is known.

    Torch's mapping begins at the address ``start``.
    """
    tensors: list[torch.Tensor] = []
    _walk(loaded, tensors)
    file = map_file(path, own=True)
    new: dict[int, torch.Tensor] = {}
    for tensor in filter(_is_plain, tensors):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            new[id(tensor)] = _view(file, storage.data_ptr() - start, tensor)
    return _replace(loaded, new)


def _view(file: Any, start: int, tensor: torch.Tensor) -> torch.Tensor:
    itemsize = tensor.dtype.itemsize
    if tensor.is_contiguous():
        view = file.tensor(start + tensor.storage_offset() * itemsize, tensor.dtype, tensor.shape)
    else:
        whole = file.tensor(start, tensor.dtype, (tensor.untyped_storage().nbytes() // itemsize,))
        view = whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return view  # type: ignore[no-any-return]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _walk(data: Any, into: list[torch.Tensor]) -> None:
    """All tensors of plain nested data. A loop, since a file may nest deeply."""
    stack = [data]
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            into.append(item)
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))
            stack += item.values() if isinstance(item, dict) else item


def _replace(data: Any, new: dict[int, torch.Tensor]) -> Any:
    """Exchange the tensors in nested dicts, in place; other containers keep theirs."""
    if isinstance(data, torch.Tensor):
        return new.get(id(data), data)
    stack = [data] if isinstance(data, dict) else []
    seen: set[int] = set()
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        for key, value in item.items():
            if isinstance(value, torch.Tensor):
                item[key] = new.get(id(value), value)
            elif isinstance(value, dict):
                stack.append(value)
    return data
