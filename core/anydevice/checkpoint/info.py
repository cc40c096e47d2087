"""What is known of a tensor in a checkpoint before any of its bytes is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["TensorInfo"]


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint.

    Attributes:
        dtype: as it stands in the file.
        shape: as it stands in the file.
        nbytes: its bytes in the file.
        file: the file that holds it, absolute.
        offset: of its first byte in the file; None when it does not lie there as plain bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    nbytes: int
    file: str
    offset: int | None = None

    @classmethod
    def describe(
        cls, dtype: torch.dtype, shape: Sequence[int], file: str, offset: int | None = None
    ) -> TensorInfo:
        """Make one; its bytes follow from the rest."""
        sizes = tuple(shape)
        return cls(dtype, sizes, math.prod(sizes) * dtype.itemsize, file, offset)
