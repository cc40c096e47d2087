"""What is loaded over several processes: a model that is given, or one from a folder or the Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint, open_checkpoint
from anydevice.errors import ModelError, OptionError
from anydevice.weights import iter_slots

__all__ = ["open_model"]


def open_model(
    model: Any, checkpoint: Any, model_class: Any, dtype: Any, options: Mapping[str, Any]
) -> tuple[Any, Checkpoint | None]:
    """The model, and where its weights are to be read; None where it has them.

    Args:
        model: a model, or a path or repo id.
        checkpoint: of a model.
        model_class: for a path.
        dtype: for a path.
        options: of `open_pretrained`, for a path.

    Raises:
        OptionError: arguments that do not go together.
        ModelError: a weight has no value, and no checkpoint is given.
        CheckpointError: see `open_checkpoint`.
    """
    _check(model, checkpoint, dtype, model_class, options)
    if not isinstance(model, nn.Module):
        from anydevice.pretrained import open_pretrained

        return open_pretrained(model_class, model, dtype, **options)
    if checkpoint is not None:
        return model, checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(
            checkpoint
        )
    empty = next((name for name, slot in iter_slots(model) if _is_empty(slot.get())), None)
    if empty is not None:
        raise ModelError(f"{empty} is on meta: pass checkpoint=, where its value is to be read")
    return model, None


def _is_empty(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta


def _check(
    model: Any,
    checkpoint: Any,
    dtype: Any,
    model_class: Any,
    options: Mapping[str, Any],
) -> None:
    if isinstance(model, nn.Module):
        given = {"dtype": dtype, "model_class": model_class, **options}
        wrong = [name for name, value in given.items() if value is not None]
        if wrong:
            raise OptionError(f"{wrong[0]}= is for a path or repo id, and a model is given")
    elif not isinstance(model, (str, os.PathLike)):
        raise OptionError(
            f"a {type(model).__name__} cannot be loaded: give a torch.nn.Module, a folder, or a "
            "Hub repo id"
        )
    elif checkpoint is not None:
        raise OptionError(f"checkpoint= is for a model, and a path or repo id is given: {model}")
