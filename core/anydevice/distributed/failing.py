"""A stage that fails: its rank goes on with zeros, so that none waits for it, and all learn why.

A rank that stopped in the middle of a schedule would leave the others waiting for its hidden
states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice.errors import ModelError
from anydevice.processes import PartialState

__all__ = ["Failing", "stand_in"]

#: Characters of an error that the other ranks are told.
_LONGEST: Final = 1000


class Failing:
    """The first error of this rank's stage in one pass, until all ranks are told.

    Args:
        state: of this process.
    """

    def __init__(self, state: PartialState) -> None:
        self._state = state
        self.error: Exception | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of the body instead of raising it."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised by `tell`
            self.error = self.error or error

    def tell(self, call: str, description: Any = None) -> None:
        """Tell all ranks how this one fared; all of them call this.

        Raises:
            Exception: the error that was kept, where there is one.
            ModelError: another rank failed; the message names it.
            CollectiveMismatchError: ``description`` differs between the ranks.
        """
        error, self.error = self.error, None
        mine = "" if error is None else f"{type(error).__name__}: {error}"[:_LONGEST]
        told = self._state.meet(call, description, mine.encode(errors="replace"))
        if error is not None:
            raise error
        for rank, reason in enumerate(told):
            if reason:
                raise ModelError(
                    f"rank {rank} failed in its stage of the pipeline: "
                    f"{reason.decode(errors='replace')}"
                )


def stand_in(
    like: torch.Tensor, received: tuple[torch.Tensor, ...], device: torch.device
) -> torch.Tensor:
    """Zeros in place of what a stage would give, through which gradients reach what it received."""
    zeros = torch.zeros(like.shape, dtype=like.dtype, device=device)
    if not torch.is_grad_enabled() or not zeros.is_floating_point():
        return zeros
    for each in received:
        if each.requires_grad:
            return zeros + (each.sum() * 0).to(zeros.dtype)
    return zeros.requires_grad_()
