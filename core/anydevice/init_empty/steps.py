"""The steps of a log, and how tensors see the storages that it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from anydevice.tensors import PLAIN_TYPES

__all__ = ["Step", "View", "flat_tensors", "is_simple", "map_call"]


class View(NamedTuple):
    """A tensor of the log: how it sees its storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> View:
        """How a tensor sees a storage that has the address given."""
        return cls(
            storage,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """One operation.

    Attributes:
        function: what to call.
        args: its arguments, with a `View` for each tensor of the log.
        kwargs: the same, by name.
        results: how each result that has a new storage sees it; None for the others.
        reads: the storages that it reads.
        writes: the storages that it makes or changes.
        default_dtype: torch's default dtype at the time.
        generator: where it draws random numbers from; None for other operations.
        index: its position in the log.
        done: whether it has run for real.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[View | None]
    reads: set[int]
    writes: set[int]
    default_dtype: torch.dtype
    generator: torch.Generator | None = None
    index: int = 0
    done: bool = False

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with values, as at the time."""
        default = torch.get_default_dtype()
        try:
            if default is not self.default_dtype:
                torch.set_default_dtype(self.default_dtype)
            return self.function(*args, **kwargs)
        finally:
            if default is not self.default_dtype:
                torch.set_default_dtype(default)


def flat_tensors(data: Any) -> list[torch.Tensor]:
    """The tensors in the arguments or results of an operation of torch."""
    if isinstance(data, torch.Tensor):
        return [data]
    found: list[torch.Tensor] = []
    for item in data if isinstance(data, (list, tuple)) else ():
        if isinstance(item, torch.Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            found += flat_tensors(item)
    return found


def is_simple(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but a view of one storage."""
    plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    return plain and not tensor.is_quantized and not tensor.is_nested


def map_call(
    function: Callable[[Any], Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: type
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of a call with everything of a kind replaced, in lists and tuples too."""

    def mapped(arg: Any) -> Any:
        if isinstance(arg, kind):
            return function(arg)
        return type(arg)(map(mapped, arg)) if type(arg) in (list, tuple) else arg

    return tuple(map(mapped, args)), {name: mapped(value) for name, value in kwargs.items()}
