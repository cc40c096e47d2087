"""A model without its weights, from a config or from the headers of a checkpoint."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from anydevice.checkpoint import Checkpoint, fetch_checkpoint, open_checkpoint
from anydevice.dispatch import init_empty_weights
from anydevice.errors import CheckpointNotFoundError, MissingDependencyError, ModelError
from anydevice.modules import as_dtype

__all__ = ["add_model_arguments", "held_dtype", "read_empty_model"]

_CONFIG: Final = "config.json"


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names a model on the command line."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder, a config.json, a checkpoint file, or a Hub repo id",
    )
    parser.add_argument("--revision", help="branch, tag or commit of a Hub repo")
    parser.add_argument("--token", help="for a private Hub repo")
    parser.add_argument(
        "--trust-remote-code",
        "--trust_remote_code",
        action="store_true",
        help="run the code that the repo carries",
    )


def read_empty_model(args: argparse.Namespace) -> tuple[nn.Module, Any | None]:
    """Build the model on meta: no weight is read or downloaded where a config is there.

    Args:
        args: with the `add_model_arguments`.

    Returns:
        The model, and its transformers config; None when only headers were read, which tell names,
        shapes and dtypes, and not how the model computes.

    Raises:
        CheckpointNotFoundError: there is neither a config nor a checkpoint.
        ModelError: the config is of no model that can be built.
        MissingDependencyError: a config alone needs transformers.
    """
    path = Path(args.model)
    config_is_there = path.is_file() and path.suffix == ".json" and ".index." not in path.name
    if config_is_there or (path / _CONFIG).is_file() or not path.exists():
        try:
            return _from_config(args)
        except MissingDependencyError:
            if config_is_there or not path.exists():
                raise
    checkpoint = open_checkpoint(fetch_checkpoint(args.model))
    return _from_headers(checkpoint), None


def _from_config(args: argparse.Namespace) -> tuple[nn.Module, Any]:
    try:
        import transformers
    except ImportError as error:
        raise MissingDependencyError(
            f"{args.model}: a model without its weights is built by transformers: "
            "pip install 'anydevice[transformers]'"
        ) from error
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if not os.path.exists(args.model):
        options |= {"revision": args.revision, "token": args.token}
    try:
        config = transformers.AutoConfig.from_pretrained(args.model, **options)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointNotFoundError(
            f"{args.model}: no config that transformers can read: {_first_line(error)}"
        ) from error
    names = getattr(config, "architectures", None) or ()
    kind = next((getattr(transformers, n) for n in names if hasattr(transformers, n)), None)
    try:
        with init_empty_weights(include_buffers=True):
            if kind is not None:
                model = kind._from_config(config)
            else:
                code = {"trust_remote_code": True} if args.trust_remote_code else {}
                auto: Any = transformers.AutoModel
                model = auto.from_config(config, **code)
        model.tie_weights()
    except Exception as error:
        raise ModelError(f"{args.model}: cannot be built: {_first_line(error)}") from error
    return model, config


def _from_headers(checkpoint: Checkpoint) -> nn.Module:
    """Modules nested as the names of the tensors are."""
    root = nn.Module()
    for name in checkpoint:
        info = checkpoint[name]
        *path, last = name.split(".")
        empty = torch.empty(info.shape, dtype=info.dtype, device="meta")
        _descend(root, path).register_parameter(last, nn.Parameter(empty, requires_grad=False))
    return _numbered_as_lists(root)


def _descend(module: nn.Module, path: Iterable[str]) -> nn.Module:
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module._modules[part]  # type: ignore[assignment]
    return module


def _numbered_as_lists(module: nn.Module) -> nn.Module:
    """Make children named 0, 1, 2, ... a `ModuleList`, as they were: each is a block of its own."""
    children = {name: _numbered_as_lists(child) for name, child in module._modules.items() if child}
    if children and not module._parameters and all(name.isdecimal() for name in children):
        return nn.ModuleList(children[name] for name in sorted(children, key=int))
    module._modules.update(children)
    return module


def held_dtype(given: str | None, config: Any | None) -> torch.dtype | None:
    """The dtype that weights are held in; None for their own."""
    if given is not None:
        return as_dtype(given)
    named = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return None if named is None else as_dtype(named)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.300}"
