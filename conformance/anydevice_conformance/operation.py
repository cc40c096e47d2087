"""What one operation is: its arguments, and how exact its result must be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch

from anydevice_conformance.dice import Dice

__all__ = ["A", "I", "N", "Operation", "P", "R"]

P: Final = "product"

A: Final = "attention"

N: Final = "normalisation"

R: Final = "reduction"

I: Final = "indexing"  # noqa: E741


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation.

    Attributes:
        kind: the check that it belongs to.
        run: does it.
        make: its arguments; floating ones in float32, which are cast.
        exact: whether the result is equal bit for bit, and the dtype stays float32.
        loose: how many times the tolerance of a matrix product it may be off.
        needed: whether a device must have it; else one without its kernel is let off.
        trained: whether a gradient comes back through it.
    """

    kind: str
    run: Callable[..., torch.Tensor]
    make: Callable[[Dice], list[torch.Tensor]]
    exact: bool = False
    loose: float = 1.0
    needed: bool = True
    trained: bool = False

    @property
    def differentiable(self) -> bool:
        """Whether its gradients are checked."""
        return self.trained or (self.kind in (P, A, N) and not self.exact)
