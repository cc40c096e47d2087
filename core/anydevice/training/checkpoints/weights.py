"""Models and optimizers in a checkpoint: whole files, or one part a process."""

from __future__ import annotations

import json
import pickle
import re
import struct
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from anydevice.engines import Engine
from anydevice.errors import (
    AnyDeviceError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    OptionError,
)
from anydevice.ties import find_tied_parameters

__all__ = [
    "ModelFiles",
    "is_alone",
    "load_model",
    "load_optimizer",
    "numbered_name",
    "read_torch",
    "save_parts",
    "save_whole",
]

#: What a file of `torch.save` begins with: an archive's mark, or before torch 1.6 a pickle's.
_MARKS: Final = (b"PK", b"\x80")
#: What torch says of states that do not fit, of a module and of an optimizer.
_MISFIT: Final = re.compile(r"loading state_dict|loaded state dict|size mismatch")


def numbered_name(name: str, index: int) -> str:
    """``model.safetensors``, ``model_1.safetensors``, ...: the reference's names of several."""
    if not index:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}_{index}{dot}{suffix}"


class ModelFiles:
    """Where a checkpoint keeps a model and an optimizer.

    ``together`` has the parts of all models and optimizers, where ``about`` says so.
    """

    safe = "model.safetensors"
    torch_file = "pytorch_model.bin"
    parts = "pytorch_model_fsdp_{}"
    optimizer = "optimizer.bin"
    optimizer_parts = "optimizer_{}"
    together = "distributed_checkpoint"
    about = "anydevice.json"


def save_whole(state: Mapping[str, Any], folder: Path, index: int, safe: bool) -> None:
    """Write a model's whole state as one safetensors file, or one of torch."""
    if not safe:
        torch.save(dict(state), folder / numbered_name(ModelFiles.torch_file, index))
        return
    others = [key for key, value in state.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise OptionError(
            f"the model's state has {others[0]!r}, which is no tensor: safetensors cannot hold it. "
            "Use save_state(safe_serialization=False)"
        )
    from huggingface_hub import save_torch_state_dict

    name = numbered_name(ModelFiles.safe, index)
    stem, _, suffix = name.rpartition(".")
    save_torch_state_dict(
        dict(state),
        folder,
        filename_pattern=f"{stem}{{suffix}}.{suffix}",
        max_shard_size="100000GB",
    )


def save_parts(state: Mapping[str, Any], folder: Path) -> None:
    """Write each process's part; all of them call this."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(dict(state), checkpoint_id=str(folder), no_dist=is_alone())


def is_alone() -> bool:
    """Whether there is no process group. torch then warns of each save and load, in any thread.

    One process is what is meant, so the warning is left out: of the process's filters, since the
    background's thread has no others.
    """
    alone = not torch.distributed.is_initialized()
    if alone:
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
    return alone


def load_model(
    engine: Engine, model: nn.Module, folder: Path, index: int, strict: bool = True
) -> None:
    """Load a model's weights, from parts or whole, whatever engine wrote them.

    Raises:
        CheckpointNotFoundError: the folder has none for it.
        CheckpointMismatchError: they are another model's.
        CorruptCheckpointError: a file is damaged.
    """
    parts, key = _parts(folder, ModelFiles.parts.format(index), "model", index)
    if parts.is_dir():
        state = engine.state_dict(model, full=False)
        _read_parts({key: state}, parts)
        with _fitting(parts, f"model {index} ({type(engine.unwrap(model)).__name__})"):
            engine.load_state_dict(model, state, strict=strict)
        return
    safe = folder / numbered_name(ModelFiles.safe, index)
    plain = folder / numbered_name(ModelFiles.torch_file, index)
    if safe.exists():
        state = _read_safetensors(safe)
    elif plain.exists():
        state = read_torch(plain)
    else:
        raise CheckpointNotFoundError(
            f"{str(folder)!r} has no weights for model {index}: neither {parts.name}, {safe.name} "
            f"nor {plain.name}. Prepare as many models, in the same order, as were saved"
        )
    for names in find_tied_parameters(engine.unwrap(model)):
        have = next((name for name in names if name in state), None)
        if have is not None:
            state.update(dict.fromkeys(names, state[have]))
    file = safe if safe.exists() else plain
    with _fitting(file, f"model {index} ({type(engine.unwrap(model)).__name__})"):
        engine.load_state_dict(model, state, strict=strict)


def load_optimizer(
    engine: Engine, model: nn.Module, optimizer: Any, folder: Path, index: int, **kwargs: Any
) -> None:
    """Load an optimizer's state, from parts or whole, whatever engine wrote it.

    Raises:
        CheckpointNotFoundError: the folder has none for it.
        CheckpointMismatchError: it is another optimizer's.
        CorruptCheckpointError: a file is damaged.
    """
    parts, key = _parts(folder, ModelFiles.optimizer_parts.format(index), "optimizer", index)
    whole = folder / numbered_name(ModelFiles.optimizer, index)
    if parts.is_dir():
        state = engine.state_dict(model, optimizer, full=False)
        _read_parts({key: state}, parts)
    elif whole.exists():
        state = read_torch(whole, **kwargs)
    else:
        raise CheckpointNotFoundError(
            f"{str(folder)!r} has no state for optimizer {index}: neither {parts.name} nor "
            f"{whole.name}. Prepare as many optimizers, in the same order, as were saved"
        )
    with _fitting(parts if parts.is_dir() else whole, f"optimizer {index}"):
        engine.load_state_dict(model, state, optimizer)


@contextmanager
def _fitting(path: Path, what: str) -> Iterator[None]:
    """Name the file and what it is loaded into, where torch says that they do not fit."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # A lost process or a lack of memory is a RuntimeError too, and says so itself.
        if isinstance(error, AnyDeviceError) or not _MISFIT.search(str(error)):
            raise
        raise CheckpointMismatchError(
            f"{str(path)!r} does not fit {what}: {str(error).strip()}\n"
            "Prepare the same things, in the same order, as when it was saved"
        ) from error


def _read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CorruptCheckpointError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception | str) -> str:
    return (
        f"{str(path)!r} cannot be read: {error}. If it is damaged, load another checkpoint, or "
        "copy the file again"
    )


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


def _parts(folder: Path, name: str, key: str, index: int) -> tuple[Path, str]:
    """The folder that would have the parts of a model or an optimizer, and their key there."""
    about = folder / ModelFiles.about
    if not about.exists():  # the reference's checkpoints have none
        return folder / name, key
    try:
        together = json.loads(about.read_text(encoding="utf-8")).get("together")
    except (ValueError, AttributeError) as error:
        raise CorruptCheckpointError(_damaged(about, error)) from error
    if together:
        return folder / ModelFiles.together, numbered_name(key, index)
    return folder / name, key


def _read_parts(state: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load(state, checkpoint_id=str(folder), no_dist=is_alone())
