"""Draws arguments of operations: sizes, values and tensors from one number."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Dice"]


class Dice:
    """Draws the arguments of an operation from one number.

    Attributes:
        special: whether infinities, NaN and the like may be among them.
        dtypes: that arguments may have beside the first one's.
    """

    def __init__(
        self, seed: int, special: bool = False, dtypes: tuple[torch.dtype, ...] = ()
    ) -> None:
        self.special = special
        self.dtypes = dtypes
        self.generator = torch.Generator().manual_seed(seed)

    def among(self, *values: Any) -> Any:
        """One of the values."""
        return values[int(torch.randint(len(values), (), generator=self.generator))]

    def size(self) -> int:
        """A size: small, odd, or just next to a power of two."""
        return int(self.among(1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65))

    def floats(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Normal numbers, in float32."""
        return torch.randn(shape, generator=self.generator) * scale

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Numbers from low to below high, in int64."""
        return torch.randint(low, high, shape, generator=self.generator)
