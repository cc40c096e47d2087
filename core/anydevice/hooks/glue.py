"""Operators in the own code of a module whose parts are on several devices.

A parent's residual ``x + self.f(x)``, its ``x * self.scale``, or ``F.linear(x, self.head.weight)``
meets tensors of several devices when its children are spread. While such a module's *own* code
runs, a `torch.overrides.TorchFunctionMode` moves an operator's tensors to one device. Modules that
lie whole on one device run without it, at full speed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from anydevice.devices import CPU, Device, parse_device
from anydevice.tensors import map_tensors, move_tensor

__all__ = ["GlueMode", "with_glue", "without_glue"]

#: Functions that mean to work across devices, or that only look at a tensor.
_ACROSS_DEVICES = frozenset(
    {
        torch.Tensor.to,
        torch.Tensor.copy_,
        torch.Tensor.type_as,
        torch.Tensor.set_,
        torch.Tensor.is_set_to,
        torch.Tensor.backward,
        torch.autograd.backward,
        torch.autograd.grad,
        torch.tensor,
        torch.as_tensor,
    }
)


class _Local(threading.local):
    """What this thread does: a mode of one thread must not concern another."""

    depth = 0  # modes of ours on this thread's stack
    muted = 0  # forwards that run without glue although one of ours lies under another's mode


_local = _Local()


class GlueMode(TorchFunctionMode):
    """Moves the tensors of each operator to one device.

    That is the tensor's own for an operator in place, the result's for ``out=``; else the first
    accelerator among them.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _local.muted and func not in _ACROSS_DEVICES:
            devices = {tensor.device for tensor in _tensors((args, kwargs))}
            if len(devices) > 1 and getattr(func, "__name__", "") != "__set__":
                args, kwargs = _gather(func, args, kwargs)
        return func(*args, **kwargs)


def with_glue(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``forward`` with operators glued, also where the caller's are not."""
    if _local.depth and not _local.muted and type(_top()) is GlueMode:
        return forward(*args, **kwargs)
    muted, _local.muted = _local.muted, 0
    _local.depth += 1
    try:
        with GlueMode():
            return forward(*args, **kwargs)
    finally:
        _local.depth -= 1
        _local.muted = muted


def without_glue(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``forward`` without glue, also where the caller's operators are glued.

    The mode is taken off the stack, as one that does nothing would still cost each operator a call.
    """
    if not _local.depth:
        return forward(*args, **kwargs)
    mode = _top()
    if type(mode) is not GlueMode:  # the user's own mode lies on ours
        _local.muted += 1
        try:
            return forward(*args, **kwargs)
        finally:
            _local.muted -= 1
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    _local.depth -= 1
    try:
        return forward(*args, **kwargs)
    finally:
        _local.depth += 1
        mode.__enter__()  # type: ignore[no-untyped-call]


def _top() -> TorchFunctionMode | None:
    """The innermost mode of this thread, ours or another's."""
    mode: TorchFunctionMode | None = _get_current_function_mode()  # type: ignore[no-untyped-call]
    return mode


def _tensors(data: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in the arguments of an operator: lists and dicts are all that they nest."""
    if isinstance(data, torch.Tensor):
        if not data.is_meta:
            yield data
    elif depth and isinstance(data, (tuple, list)):
        for item in data:
            yield from _tensors(item, depth - 1)
    elif depth and isinstance(data, Mapping):
        for item in data.values():
            yield from _tensors(item, depth - 1)


def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    target = _target(func, args, kwargs)

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta else move_tensor(tensor, target)

    args = tuple(map_tensors(move, arg) for arg in args)
    return args, {name: map_tensors(move, value) for name, value in kwargs.items()}


def _target(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Device:
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and (
        not name.endswith("__")
        or name == "__setitem__"
        or (name[:3] == "__i" and name != "__invert__")
    )
    if kwargs.get("out") is not None:
        first = next(_tensors(kwargs["out"]), None)
    elif in_place or kwargs.get("inplace"):
        first = next(_tensors(args), None)
    else:
        first = None
    if first is not None:
        return parse_device(first.device)
    devices = [parse_device(tensor.device) for tensor in _tensors((args, kwargs))]
    return next((device for device in devices if device.is_accelerator), CPU)
