"""What is loaded over several processes: a model that is given, or one from a folder or the Hub."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from typing import Any, Final

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint, open_checkpoint
from anydevice.errors import ModelError, OptionError, UnknownArgumentError
from anydevice.tensors import is_sharded
from anydevice.text import list_some, suggest
from anydevice.weights import iter_slots

__all__ = ["open_model"]

#: What is passed on to `anydevice.pretrained.open_pretrained`.
_PASSED_ON: Final = (
    "attn_implementation",
    "cache_dir",
    "config",
    "local_files_only",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
    "variant",
)
#: What other libraries call the two ways to divide a model.
_BOTH_WAYS: Final = frozenset(
    {"device_mesh", "mesh", "pp_plan", "pp_size", "tp_plan", "tp_size", "tensor_parallel_size"}
)
_QUANTIZED: Final = (
    "a quantizer loads a model as a whole: use anydevice.from_pretrained in one process"
)
_ONE_WAY: Final = (
    "a model is divided in one way, over all processes: load_pipeline gives each some blocks, and "
    "load_tensor_parallel a part of every layer"
)


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
        UnknownArgumentError: one that there is not.
        ModelError: a weight has no value, and no checkpoint is given.
        CheckpointError: see `open_checkpoint`.
    """
    _refuse_unknown(options)
    _check(model, checkpoint, dtype, model_class, options)
    if not isinstance(model, nn.Module):
        from anydevice.pretrained import open_pretrained

        return open_pretrained(model_class, model, dtype, **options)
    _refuse_divided(model)
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


def _refuse_unknown(names: Collection[str]) -> None:
    for name in names:
        if name in _PASSED_ON:
            continue
        if name == "quantization_config":
            why = f": {_QUANTIZED}"
        elif name in _BOTH_WAYS:
            why = f": {_ONE_WAY}"
        else:
            why = suggest(name, _PASSED_ON) or f": besides its own it takes {list_some(_PASSED_ON)}"
        raise UnknownArgumentError(f"there is no argument {name}={why}")


def _refuse_divided(model: nn.Module) -> None:
    name = next((n for n, p in model.named_parameters() if is_sharded(p)), None)
    if name is not None:
        raise ModelError(f"{name} is divided over processes already: {_ONE_WAY}")


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
