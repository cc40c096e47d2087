"""Reading a checkpoint's files: what is damaged is named, before anything is loaded."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from anydevice.errors import CheckpointError, CorruptCheckpointError
from anydevice.training.checkpoints.weights import ModelFiles, is_alone, numbered_name

__all__ = ["Parts", "read_safetensors", "read_torch", "shapes_of"]

#: What a file of `torch.save` begins with: an archive's mark, or before torch 1.6 a pickle's.
_MARKS: Final = (b"PK", b"\x80")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Say which file is damaged."""
    try:
        yield
    except SafetensorError as error:
        raise CorruptCheckpointError(_damaged(path, error)) from error


def _damaged(path: Path, error: BaseException | str) -> str:
    return (
        f"{str(path)!r} cannot be read: {error}. If it is damaged, load another checkpoint, or "
        "copy the file again"
    )


def shapes_of(path: Path) -> dict[str, torch.Size]:
    """The shapes of a safetensors file's tensors, of which none is read.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    with _reading(path), safe_open(path, "pt") as file:
        return {key: torch.Size(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """A safetensors file's tensors.

    Raises:
        CorruptCheckpointError: it is damaged.
    """
    with _reading(path):
        return load_file(path)


def read_torch(path: Path, **kwargs: Any) -> Any:
    """A file of `torch.save`, read without running code that it may carry.

    Raises:
        CorruptCheckpointError: it is damaged.
        pickle.UnpicklingError: it carries objects that are not read without ``weights_only=False``.
    """
    with path.open("rb") as file:
        if not file.read(2).startswith(_MARKS):
            raise CorruptCheckpointError(_damaged(path, "it is no file of torch.save"))
    try:
        return _load(path, **kwargs)
    except (pickle.UnpicklingError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, OSError, EOFError, struct.error) as error:
        raise CorruptCheckpointError(_damaged(path, error)) from error


def _load(path: Path, **kwargs: Any) -> Any:
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, **kwargs}
    if not options["weights_only"]:
        return torch.load(path, **options)
    import numpy

    array = numpy.empty(0).__reduce__()[0]
    dtypes = [type(numpy.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    allowed: list[Any] = [array, numpy.ndarray, numpy.dtype, *dtypes]
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, **options)


class Parts:
    """The folder that has, or would have, the parts of a model or an optimizer.

    Args:
        folder: of the checkpoint.
        name: of the folder within it, where each model and optimizer has its own.
        key: what the parts are called in it: "model" or "optimizer".
        index: of the model or optimizer.

    Raises:
        CorruptCheckpointError: the checkpoint's own description is damaged.
    """

    def __init__(self, folder: Path, name: str, key: str, index: int) -> None:
        self.path, self.key = folder / name, key
        about = folder / ModelFiles.about
        if not about.exists():  # the reference's checkpoints have none
            return
        try:
            together = json.loads(about.read_text(encoding="utf-8")).get("together")
        except (ValueError, AttributeError) as error:
            raise CorruptCheckpointError(_damaged(about, error)) from error
        if together:
            self.path, self.key = folder / ModelFiles.together, numbered_name(key, index)

    def exist(self) -> bool:
        """Whether the checkpoint has them."""
        return self.path.is_dir()

    def shapes(self) -> dict[str, torch.Size | None]:
        """What is written under the key, by name; None stands for what is no tensor.

        Raises:
            CorruptCheckpointError: the description of the parts is damaged, or a file is not
                there or too short.
        """
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        try:
            found = FileSystemReader(self.path).read_metadata()
        except Exception as error:
            raise CorruptCheckpointError(_damaged(self.path / ".metadata", error)) from error
        for part in (found.storage_data or {}).values():
            file = self.path / part.relative_path
            size = file.stat().st_size if file.exists() else 0
            if size < part.offset + part.length:
                raise CorruptCheckpointError(_damaged(file, f"it has only {size} bytes"))
        start = f"{self.key}."
        return {
            name.removeprefix(start): getattr(entry, "size", None)
            for name, entry in found.state_dict_metadata.items()
            if name.startswith(start)
        }

    def read(self, state: Mapping[str, Any]) -> None:
        """Read into the tensors of ``state``; all processes call this.

        Raises:
            CheckpointError: something could not be read.
        """
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        try:
            load({self.key: state}, checkpoint_id=str(self.path), no_dist=is_alone())
        except CheckpointException as error:
            raise CheckpointError(_damaged(self.path, error)) from error
