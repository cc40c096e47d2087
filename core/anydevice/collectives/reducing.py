"""One value out of those that the ranks have."""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice.collectives.describing import describe, rebuild, tensors_of
from anydevice.errors import OptionError
from anydevice.processes import PartialState

__all__ = ["reduce"]

_REDUCTIONS: Final = ("mean", "sum", "max", "none")
#: Dtypes in which a sum is made as it is; smaller floats are summed in float32.
_OWN: Final = frozenset({torch.float32, torch.float64, torch.complex64, torch.complex128})


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine each tensor in nested data over all ranks, element by element.

    Args:
        tensor: a tensor, or nested data of them, of the same structure, shapes and dtypes on each
            rank.
        reduction: ``"mean"``, ``"sum"``, ``"max"``, or ``"none"`` (each rank keeps its own).
        scale: a factor of the result.

    Returns:
        The same structure with new tensors, equal on all ranks. Small floats are summed in float32
        and keep their dtype; the sum of bools is a count (int64); the mean of integers and bools is
        float32.

    Raises:
        CollectiveMismatchError: structures, shapes, dtypes or the reduction differ.
        MissingRankError: a rank does not make the call.
        OptionError: an unknown reduction, or the maximum of complex numbers.
        TypeError: there is something else than tensors.

    Example:
        >>> import torch
        >>> from anydevice.utils import reduce
        >>> reduce(torch.ones(2), "sum")  # one process: what it has
        tensor([1., 1.])
    """
    if reduction not in _REDUCTIONS:
        raise OptionError(f"reduction={reduction!r}: use one of {', '.join(_REDUCTIONS)}")
    state = PartialState()
    tensors = tensors_of(tensor, "reduce")
    if reduction == "max" and any(t.is_complex() for t in tensors):
        raise OptionError("reduce: complex numbers have no maximum")
    if state.num_processes > 1:
        state.meet("reduce", f"{describe(tensor)} by {reduction}")
    with torch.no_grad(), state.collective("reduce"):
        return rebuild(tensor, _reduce(tensors, reduction, scale, state.num_processes))


def _reduce(
    tensors: list[torch.Tensor], reduction: str, scale: float, size: int
) -> list[torch.Tensor]:
    """One collective for each device and dtype; integers and floats are never mixed."""
    groups: dict[tuple[str, torch.dtype], list[int]] = {}
    for position, tensor in enumerate(tensors):
        key = (str(tensor.device), _carrier(tensor.dtype, reduction))
        groups.setdefault(key, []).append(position)
    found = list(tensors)
    for (_, carrier), positions in groups.items():
        mine = [tensors[position].detach() for position in positions]
        whole = torch.cat([t.reshape(-1).to(carrier) for t in mine])
        if size > 1 and whole.numel() and reduction != "none":
            operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
            dist.all_reduce(whole, op=operation)
        if reduction == "mean":
            whole = whole / size
        if scale != 1.0:
            whole = whole * scale
        pieces = torch.split(whole, [t.numel() for t in mine])
        for position, old, piece in zip(positions, mine, pieces, strict=True):
            dtype = _result(old.dtype, reduction, piece.dtype)
            found[position] = piece.reshape(old.shape).to(dtype)
    return found


def _carrier(dtype: torch.dtype, reduction: str) -> torch.dtype:
    """The dtype in which a reduction is made."""
    if reduction == "none" or dtype in _OWN:
        return dtype
    if dtype.is_floating_point:
        return torch.float32
    if dtype == torch.bool and reduction == "max":
        return torch.uint8
    return torch.int64


def _result(dtype: torch.dtype, reduction: str, made: torch.dtype) -> torch.dtype:
    """The dtype of a reduction's result."""
    if dtype.is_floating_point or dtype.is_complex or not made.is_floating_point:
        return torch.int64 if dtype == torch.bool and reduction == "sum" else dtype
    return torch.float32
