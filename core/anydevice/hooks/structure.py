"""What a module's own code needs, as its class and attributes tell."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from anydevice.hooks.code_search import uses_host_operators

__all__ = ["computes_with_parts", "needs_alignment"]

#: Containers whose children are called by other code, or one after the other.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def computes_with_parts(module: nn.Module) -> bool:
    """Whether a module is known to use the weights of its parts without calling them."""
    if isinstance(module, _CONTAINERS):
        return False
    return hasattr(module, "parametrizations") or type(module) is nn.MultiheadAttention


def needs_alignment(module: nn.Module) -> bool:
    """Whether a module's own code must be aligned even where all its weights are in one place."""
    return _has_loose_tensors(module) or uses_host_operators(module)


def _has_loose_tensors(module: nn.Module) -> bool:
    """Whether a module keeps tensors as plain attributes: those are not placed, only aligned.

    Old-style ``weight_norm`` and ``spectral_norm`` do, too: they set the weight before each
    forward.
    """
    own = {id(t) for table in (module._parameters, module._buffers) for t in table.values()}
    return any(_is_loose(value, own) for value in module.__dict__.values())


def _is_loose(value: Any, own: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return id(value) not in own
    if type(value) in (list, tuple):
        return any(isinstance(item, torch.Tensor) and id(item) not in own for item in value)
    return False
