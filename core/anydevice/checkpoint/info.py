"""What is known of a tensor in a checkpoint before its bytes are read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["TensorInfo", "form_of"]


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        dtype: in the file.
        shape: in the file.
        nbytes: its bytes in the file.
        file: the file that holds it, absolute.
        offset: of its first byte in the file; None when it is not stored as plain bytes.
        form: see `form_of`; only a torch file can have another than None.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int | None = None
    form: str | None = None

    @classmethod
    def describe(
        cls,
        dtype: torch.dtype,
        shape: Sequence[int],
        file: str,
        offset: int | None = None,
        form: str | None = None,
    ) -> TensorInfo:
        """Make one; ``nbytes`` follows from the others."""
        sizes = tuple(shape)
        return cls(dtype, sizes, math.prod(sizes) * dtype.itemsize, file, offset, form)


def form_of(tensor: torch.Tensor) -> str | None:
    """The kind of a tensor that is not one plain block of numbers; None for one that is.

    Returns:
        ``"meta"`` for one without data, ``"quantized"``, its layout (``"sparse_coo"``), or the name
        of a class that is made of other tensors.
    """
    if hasattr(tensor, "__tensor_flatten__"):
        return type(tensor).__name__
    if tensor.is_meta:
        return "meta"
    if tensor.is_quantized:
        return "quantized"
    if tensor.layout is not torch.strided:
        return str(tensor.layout).removeprefix("torch.")
    return None
