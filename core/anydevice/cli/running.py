"""What a forward pass of a model needs beside its weights, from the numbers of its config."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch
from torch import nn

from anydevice.errors import ModelError

__all__ = ["Running", "add_caches", "read_running"]


@dataclasses.dataclass(frozen=True)
class Running:
    """Bytes that a forward pass needs beside the weights; 0 where nothing was asked for.

    Attributes:
        cache: keys and values of one layer.
        layers: full names of the layers that keep them.
        activations: of the widest moment.
    """

    cache: int = 0
    layers: tuple[str, ...] = ()
    activations: int = 0


def read_running(
    args: argparse.Namespace, model: nn.Module, config: Any | None, dtype: Any
) -> Running:
    """What ``--batch`` and ``--context`` ask for, from the config's numbers."""
    if not args.batch and not args.context:
        return Running()
    if args.batch < 0 or args.context < 0:
        raise ModelError("--batch and --context are numbers from 1 on")
    text = getattr(config, "text_config", None) or config
    count = getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    width = getattr(text, "hidden_size", None)
    if not (count and heads and width):
        raise ModelError(
            f"{args.model}: --batch and --context need a config that has layers, heads and "
            "hidden size"
        )
    layers = _layers(model, count)
    tokens = max(args.batch, 1) * max(args.context, 1)
    element = dtype.itemsize if isinstance(dtype, torch.dtype) else 2
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    head = getattr(text, "head_dim", None) or width // heads
    cached = tokens
    window = getattr(text, "sliding_window", None)
    if window and getattr(text, "use_sliding_window", True):
        cached = max(args.batch, 1) * min(max(args.context, 1), window)
    decodes = not getattr(text, "is_encoder_decoder", False) and hasattr(model, "generate")
    cache = 2 * cached * kv_heads * head * element if decodes else 0
    inner = getattr(text, "intermediate_size", None) or 4 * width
    vocabulary = getattr(text, "vocab_size", None) or 0
    activations = tokens * (4 * width + 2 * inner) * element + tokens * vocabulary * 4
    return Running(cache, layers, activations)


def _layers(model: nn.Module, count: int) -> tuple[str, ...]:
    """The full names of the model's layers: of the longest list of so many modules."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return tuple(f"{name}.{i}" for i in range(count))
    raise ModelError(f"{type(model).__name__}: no list of {count} layers, as its config says")


def add_caches(model: nn.Module, running: Running) -> None:
    """Count the cache of a layer as a buffer of it."""
    for name in running.layers if running.cache else ():
        cache = torch.empty(running.cache, dtype=torch.uint8, device="meta")
        model.get_submodule(name).register_buffer("anydevice_cache", cache, persistent=False)
