"""Calling functions with values in place of tensors that are on meta only for now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anydevice.init_empty.log import Log
from anydevice.init_empty.real_storages import as_inference
from anydevice.nested import map_tensors

__all__ = ["call_with_values"]


def call_with_values(
    log: Log, function: Callable[..., Any], args: Any, kwargs: Any, *, leaves: bool = False
) -> Any:
    """Call a function with values in place of tensors of a log, which see what it does to these.

    Args:
        log: the log.
        function: what to call.
        args: its arguments.
        kwargs: the same, by name.
        leaves: whether values require gradients where the tensors do.
    """
    values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def value(tensor: torch.Tensor) -> torch.Tensor:
        if tensor not in log:
            return tensor
        if id(tensor) not in values:
            real = log.value(tensor)
            if leaves and tensor.requires_grad and not real.is_inference():
                real.requires_grad_()
            values[id(tensor)] = (tensor, real)
        return values[id(tensor)][1]

    args, kwargs = map_tensors(value, args), map_tensors(value, kwargs)
    was_eager, log.is_eager = log.is_eager, True
    try:
        result = function(*args, **kwargs)
    finally:
        log.is_eager = was_eager
    if not values:
        return result
    for late, real in values.values():
        _follow(log, late, real.detach())
    originals = {id(real): late for late, real in values.values()}
    return map_tensors(lambda t: originals.get(id(t), t), result)


def _follow(log: Log, late: torch.Tensor, real: torch.Tensor) -> None:
    """Let a tensor see what its value sees, if a function gave that another shape or storage."""
    if log.is_adopted(log.view(late), real):
        return
    with as_inference(late.is_inference()):
        torch.Tensor.data.__set__(late, log.adopt(real))  # type: ignore[attr-defined]
    log.hold(late)
