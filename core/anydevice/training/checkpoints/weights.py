"""Writing models and optimizers: whole files, or one part a process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from anydevice.errors import OptionError

__all__ = [
    "ModelFiles",
    "is_alone",
    "numbered_name",
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
