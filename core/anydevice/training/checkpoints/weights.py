"""Models and optimizers in a checkpoint: whole files, or one part a process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from anydevice.engines import Engine
from anydevice.errors import CheckpointNotFoundError, OptionError
from anydevice.ties import find_tied_parameters

__all__ = [
    "ModelFiles",
    "load_model",
    "load_optimizer",
    "numbered_name",
    "read_torch",
    "save_parts",
    "save_whole",
]


def numbered_name(name: str, index: int) -> str:
    """``model.safetensors``, ``model_1.safetensors``, ...: the reference's names of several."""
    if not index:
        return name
    stem, dot, suffix = name.partition(".")
    return f"{stem}_{index}{dot}{suffix}"


class ModelFiles:
    """Where a checkpoint keeps a model and an optimizer."""

    safe = "model.safetensors"
    torch_file = "pytorch_model.bin"
    parts = "pytorch_model_fsdp_{}"
    optimizer = "optimizer.bin"
    optimizer_parts = "optimizer_{}"


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

    alone = not torch.distributed.is_initialized()
    save(dict(state), checkpoint_id=str(folder), no_dist=alone)


def load_model(
    engine: Engine, model: nn.Module, folder: Path, index: int, strict: bool = True
) -> None:
    """Load a model's weights, from parts or whole, whatever engine wrote them.

    Raises:
        CheckpointNotFoundError: the folder has none for it.
    """
    parts = folder / ModelFiles.parts.format(index)
    if parts.is_dir():
        state = engine.state_dict(model, full=False)
        _read_parts({"model": state}, parts)
        engine.load_state_dict(model, state, strict=strict)
        return
    safe = folder / numbered_name(ModelFiles.safe, index)
    plain = folder / numbered_name(ModelFiles.torch_file, index)
    if safe.exists():
        state = load_file(safe)
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
    engine.load_state_dict(model, state, strict=strict)


def load_optimizer(
    engine: Engine, model: nn.Module, optimizer: Any, folder: Path, index: int, **kwargs: Any
) -> None:
    """Load an optimizer's state, from parts or whole, whatever engine wrote it.

    Raises:
        CheckpointNotFoundError: the folder has none for it.
    """
    parts = folder / ModelFiles.optimizer_parts.format(index)
    whole = folder / numbered_name(ModelFiles.optimizer, index)
    if parts.is_dir():
        state = engine.state_dict(model, optimizer, full=False)
        _read_parts({"optimizer": state}, parts)
    elif whole.exists():
        state = read_torch(whole, **kwargs)
    else:
        raise CheckpointNotFoundError(
            f"{str(folder)!r} has no state for optimizer {index}: neither {parts.name} nor "
            f"{whole.name}. Prepare as many optimizers, in the same order, as were saved"
        )
    engine.load_state_dict(model, state, optimizer)


def read_torch(path: Path, **kwargs: Any) -> Any:
    """A file of `torch.save`, read without running code that it may carry."""
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": True, **kwargs}
    if not options["weights_only"]:
        return torch.load(path, **options)
    import numpy

    array = numpy.empty(0).__reduce__()[0]
    dtypes = [type(numpy.dtype(kind)) for kind in ("uint32", "int64", "float64")]
    allowed: list[Any] = [array, numpy.ndarray, numpy.dtype, *dtypes]
    with torch.serialization.safe_globals(allowed):
        return torch.load(path, **options)


def _read_parts(state: dict[str, Any], folder: Path) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    alone = not torch.distributed.is_initialized()
    load(state, checkpoint_id=str(folder), no_dist=alone)
