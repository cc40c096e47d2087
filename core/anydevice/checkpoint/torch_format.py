"""Files of `torch.save`: never run code from them, never copy what can be mapped.

Both formats are read: the zip archive, whose tensors are mapped, and the older one, a run of
pickles and bytes, which torch reads into memory.
"""

from __future__ import annotations

import pickle
import sys
import warnings
import zipfile
from collections.abc import Mapping
from typing import Any, Final

import torch

from anydevice.checkpoint.mapped import FileIdentity, map_file
from anydevice.errors import CorruptCheckpointError, UnsafeCheckpointError

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


def looks_like_torch(start: bytes) -> bool:
    """Whether a file's first bytes are those of a file of `torch.save`."""
    return start.startswith((_ZIP, _PICKLE))


def read_torch_file(path: str) -> Any:
    """Load what was saved, tensors on the host, without running code from the file.

    Raises:
        CheckpointNotFoundError: no such file.
        CorruptCheckpointError: it is damaged, or no file of torch.
        UnsafeCheckpointError: it holds more than tensors and plain data.
    """
    if FileIdentity.of(path).size == 0:
        raise CorruptCheckpointError(f"{path} is empty. Fetch it again, or save it again.")
    with open(path, "rb") as file:
        is_zip = file.read(len(_ZIP)) == _ZIP
    records = _records(path) if is_zip else {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TypedStorage, and hints that the errors below give
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip or None)
    except Exception as error:  # a damaged pickle can fail in any way
        raise _refusal(path, error) from error
    return _mapped_anew(path, loaded, records) if is_zip else loaded


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


def _refusal(path: str, error: Exception) -> Exception:
    text = str(error)
    words = text.lower()
    if isinstance(error, (pickle.UnpicklingError, RuntimeError)) and any(
        w in words for w in _CODE_WORDS
    ):
        reason = next((line.strip() for line in text.splitlines() if "rror:" in line), text[:300])
        return UnsafeCheckpointError(
            f"{path} holds more than tensors and plain data, and reading it would run code from it "
            f"({reason:.300}). If you trust it, load it yourself with torch.load(..., "
            "weights_only=False) and save the tensors with safetensors.torch.save_file; or allow "
            "its classes with torch.serialization.add_safe_globals."
        )
    return CorruptCheckpointError(
        f"{path} cannot be read as a file of torch.save: {type(error).__name__}: {text:.300}. "
        "Fetch it again, or save it again."
    )


def _records(path: str) -> dict[int, int]:
    """Offset and size of each record of tensor bytes in a zip archive.

    Raises:
        CorruptCheckpointError: it is no whole archive, or one that torch did not write.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            records = {}
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise CorruptCheckpointError(
                        f"{path} has the compressed entry {entry.filename!r:.200}; torch.save "
                        "compresses nothing. Save it again."
                    )
                if "/data/" in entry.filename and entry.file_size:
                    records[_data_offset(file, entry)] = entry.file_size
                elif entry.filename.endswith("/byteorder"):
                    with archive.open(entry) as order:
                        if order.read(16) != sys.byteorder.encode():
                            return {}  # torch swaps the bytes in memory: nothing can be mapped
            return records
    except CorruptCheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - a damaged archive can fail in any way
        raise CorruptCheckpointError(
            f"{path} is not a whole zip archive: {error!s:.200}. Fetch it again, or save it again."
        ) from None


def _data_offset(file: Any, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its local header, whose length is in the header."""
    file.seek(entry.header_offset + 26)
    lengths = file.read(4)
    return (
        entry.header_offset
        + 30
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )


def _mapped_anew(path: str, loaded: Any, records: dict[int, int]) -> Any:
    """Exchange tensors of torch's mapping for views of ours, so that their file is known.

    Torch's tensors are views of one mapping, and torch does not say where it begins. But the
    records' offsets are known from the archive: the lowest storage is the first record. Unless this
    holds for each storage, all stay as torch gave them.
    """
    tensors: list[torch.Tensor] = []
    _walk(loaded, tensors)
    plain = [t for t in tensors if _is_plain(t)]
    starts = {s.data_ptr(): s.nbytes() for t in plain if (s := t.untyped_storage()).nbytes()}
    if not starts or not records:
        return loaded
    base = min(starts) - min(records)
    if any(records.get(pointer - base) != nbytes for pointer, nbytes in starts.items()):
        return loaded
    file = map_file(path, own=True)
    new: dict[int, torch.Tensor] = {}
    for tensor in plain:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            new[id(tensor)] = _view(file, storage.data_ptr() - base, tensor)
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
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
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
