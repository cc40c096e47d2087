"""Tied names that the checkpoint has separately: whether their values are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from anydevice.checkpoint.checkpoint import Checkpoint
from anydevice.checkpoint.info import TensorInfo
from anydevice.loading.match import Plan

__all__ = ["broken_ties"]

#: Elements compared at once.
_STEP: Final = 1 << 20
#: Elements that are compared of each end and of the middle, where a look must do.
_LOOK: Final = 1 << 10


def broken_ties(plan: Plan, checkpoint: Checkpoint, *, whole: bool) -> Iterator[str]:
    """A line for each name whose values are not those of the name that it is tied to.

    All values are compared, or a few of those that are views of a file: weights that were trained
    apart differ nearly everywhere, and no weight is read for this.
    """
    for name, others in plan.doubles.items():
        info = checkpoint[name]
        for other in others:
            tied = checkpoint[other]
            if _is_one_place(info, tied) or info.form is not None or tied.form is not None:
                continue
            if not whole and (info.offset is None or tied.offset is None):
                continue
            step = _STEP if whole else _LOOK
            if not _same(checkpoint.tensor(name), checkpoint.tensor(other), step, whole):
                yield (
                    f"{other} has other values in the checkpoint than {name}, to which it is tied "
                    "in the model"
                )


def _is_one_place(info: TensorInfo, tied: TensorInfo) -> bool:
    return info.offset is not None and (info.file, info.offset) == (tied.file, tied.offset)


def _same(first: torch.Tensor, second: torch.Tensor, step: int, whole: bool) -> bool:
    a, b = first.detach().reshape(-1), second.detach().reshape(-1)
    count = a.numel()
    starts = range(0, count, step) if whole else (0, count // 2, max(0, count - step))
    return all(_equal(a[at : at + step], b[at : at + step]) for at in starts)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether bytes are equal: so NaN is itself; of two dtypes, values as the narrower has them."""
    if a.dtype.itemsize < b.dtype.itemsize:
        a, b = b, a
    if a.dtype != b.dtype:
        a = a.to(b.dtype)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
