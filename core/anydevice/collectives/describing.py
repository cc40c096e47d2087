"""What a rank brings to a collective: the tensors in nested data, and words that describe them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from anydevice.errors import OptionError
from anydevice.nested import map_tensors
from anydevice.tensors import is_sharded

__all__ = ["describe", "rebuild", "tensors_of"]


def tensors_of(data: Any, call: str) -> list[torch.Tensor]:
    """Every tensor in nested data, in order.

    Args:
        data: a tensor, or nested lists, tuples, mappings and dataclasses of tensors and None.
        call: for messages.

    Raises:
        TypeError: there is something else in it.
        OptionError: a tensor without ordinary memory (sparse, nested, quantized, sharded).
    """
    found = []
    for path, leaf in _leaves(data, ""):
        if leaf is None:
            continue
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{call} is for tensors in nested lists, tuples, mappings and dataclasses; "
                f"{f'at {path} ' if path else ''}there is a {type(leaf).__name__}. For other "
                "objects: gather_object, broadcast_object_list."
            )
        if leaf.layout is not torch.strided or leaf.is_nested or leaf.is_quantized:
            raise OptionError(f"{call}: the tensor at {path or 'the top'} is no dense tensor")
        if is_sharded(leaf):
            raise OptionError(
                f"{call}: the tensor at {path or 'the top'} is sharded over processes already "
                "(a DTensor): use its full_tensor()"
            )
        found.append(leaf)
    return found


def rebuild(data: Any, new: Sequence[torch.Tensor]) -> Any:
    """The same nested data with other tensors, in the order of `tensors_of`."""
    following = iter(new)
    return map_tensors(lambda _: next(following), data)


def describe(data: Any, *, shapes: bool = True) -> str:
    """Structure, dtypes and shapes in a line that two ranks can compare.

    Args:
        data: see `tensors_of`.
        shapes: False: only how many dimensions.

    Example:
        >>> describe({"a": torch.zeros(2, 3), "b": [torch.zeros(0, dtype=torch.int64)]})
        "{'a': float32[2, 3], 'b': [int64[0]]}"
    """
    if isinstance(data, torch.Tensor):
        dtype = str(data.dtype).removeprefix("torch.")
        place = "" if data.device.type == "cpu" else f" on {data.device.type}"
        shape = list(data.shape) if shapes else f"[{data.ndim}d]"
        return f"{dtype}{shape}{place}"
    if isinstance(data, Mapping):
        inner = ", ".join(f"{key!r}: {describe(v, shapes=shapes)}" for key, v in data.items())
        return f"{{{inner}}}"
    if isinstance(data, (list, tuple, collections.deque)):
        inner = ", ".join(describe(item, shapes=shapes) for item in data)
        return f"({inner})" if isinstance(data, tuple) else f"[{inner}]"
    if dataclasses.is_dataclass(data) and not isinstance(data, type):
        parts = (
            f"{field.name}={describe(getattr(data, field.name, None), shapes=shapes)}"
            for field in dataclasses.fields(data)
        )
        return f"{type(data).__name__}({', '.join(parts)})"
    return type(data).__name__


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    # The same order as `map_tensors`, which puts the results back.
    if isinstance(data, torch.Tensor):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{path}[{key!r}]")
    elif isinstance(data, (list, tuple, collections.deque)) and not hasattr(data, "to"):
        for index, item in enumerate(data):
            yield from _leaves(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(data) and not isinstance(data, type):
        for field in dataclasses.fields(data):
            if hasattr(data, field.name):
                yield from _leaves(getattr(data, field.name), f"{path}.{field.name}")
    else:
        yield path, data
