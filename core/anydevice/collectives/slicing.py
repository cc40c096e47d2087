"""Taking a part of nested data, and asking how many samples it has."""

from __future__ import annotations

from typing import Any

from anydevice.nested import iter_tensors, map_tensors

__all__ = ["find_batch_size", "is_namedtuple", "slice_tensors"]


def slice_tensors(
    data: Any,
    tensor_slice: slice,
    process_index: int | None = None,
    num_processes: int | None = None,
) -> Any:
    """Take a slice of each tensor in nested data.

    Args:
        data: a tensor, or nested data of them.
        tensor_slice: along the first dimension; tensors without dimensions are left alone.
        process_index: taken for the reference's sake; not used.
        num_processes: as above.

    Example:
        >>> import torch
        >>> from anydevice.utils import slice_tensors
        >>> slice_tensors({"ids": torch.arange(4)}, slice(1, 3))
        {'ids': tensor([1, 2])}
    """
    return map_tensors(lambda t: t[tensor_slice] if t.ndim else t, data)


def find_batch_size(data: Any) -> int | None:
    """The length of the first dimension of the first tensor that has one; None without such.

    Example:
        >>> import torch
        >>> from anydevice.utils import find_batch_size
        >>> find_batch_size({"ids": torch.zeros(4, 2)})
        4
    """
    return next((int(t.shape[0]) for t in iter_tensors(data) if t.ndim), None)


def is_namedtuple(data: Any) -> bool:
    """Whether something is a namedtuple.

    Example:
        >>> from collections import namedtuple
        >>> from anydevice.utils import is_namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    return isinstance(data, tuple) and hasattr(data, "_asdict") and hasattr(data, "_fields")
