"""How collectives combine the values of the ranks, and what that gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_kind import REDUCED, SUMMED

__all__ = ["OPERATIONS", "Operation"]

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
_COMPLEX: Final = (torch.complex64,)
_WHOLE: Final = (torch.int64, torch.int32, torch.uint8, torch.int8)


@dataclasses.dataclass(frozen=True)
class Operation:
    """A way to combine.

    Attributes:
        named: as `torch.distributed` knows it.
        reduced: the same of one tensor whose first dimension is that of the ranks.
        dtypes: that are tried.
        needed: the dtypes that a device must have; it may refuse the others.
        high: values are below it, where sums of the usual ones would not do.
        unordered: whether values that are not numbers have a result, too.
    """

    named: Any
    reduced: Callable[[torch.Tensor], torch.Tensor]
    dtypes: tuple[torch.dtype, ...]
    needed: tuple[torch.dtype, ...] = ()
    high: int | None = None
    unordered: bool = False


def _sum(stacked: torch.Tensor) -> torch.Tensor:
    return stacked.sum(0, dtype=stacked.dtype)


def _bits(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Any:
    def reduced(stacked: torch.Tensor) -> torch.Tensor:
        found = stacked[0]
        for one in stacked[1:]:
            found = change(found, one)
        return found

    return reduced


_OP: Final[Any] = dist.ReduceOp
#: Name to operation.
OPERATIONS: Final[dict[str, Operation]] = {
    "sum": Operation(
        _OP.SUM,
        _sum,
        (*REDUCED, *_COMPLEX, torch.uint8, torch.int8),
        needed=SUMMED,
        unordered=True,
    ),
    "greatest": Operation(
        _OP.MAX, lambda stacked: stacked.amax(0), (*REDUCED, *_WHOLE[2:]), needed=SUMMED
    ),
    "least": Operation(
        _OP.MIN, lambda stacked: stacked.amin(0), (*REDUCED, *_WHOLE[2:]), needed=SUMMED
    ),
    "mean": Operation(
        _OP.AVG, lambda stacked: _sum(stacked) / len(stacked), _FLOATS, unordered=True
    ),
    "product": Operation(
        _OP.PRODUCT, lambda stacked: stacked.prod(0, dtype=stacked.dtype), REDUCED, high=4
    ),
    "and": Operation(_OP.BAND, _bits(torch.bitwise_and), _WHOLE),
    "or": Operation(_OP.BOR, _bits(torch.bitwise_or), _WHOLE),
    "exclusive or": Operation(_OP.BXOR, _bits(torch.bitwise_xor), _WHOLE),
}
