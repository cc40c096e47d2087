"""What a placement is made from, besides the model: one object for all that take such options."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from anydevice.dtypes import DtypeLike
from anydevice.placement.budgets import Headroom, check_budgets

__all__ = ["PlacementOptions"]


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """See `infer_auto_device_map` for each.

    Raises:
        BudgetError, UnknownDeviceError: a budget cannot be read.
    """

    max_memory: Mapping[Any, int | str] | None = None
    no_split_module_classes: Collection[str] | str | None = None
    dtype: DtypeLike | None = None
    special_dtypes: Mapping[str, DtypeLike] | None = None
    offload_buffers: bool = False
    fallback_allocation: bool = False
    headroom: Headroom = None
    disk: bool | int | str = True
    prefetch: bool = True
    #: The budgets are of devices elsewhere: what this machine's devices can hold does not matter.
    pretended: bool = False

    def __post_init__(self) -> None:
        check_budgets(self.max_memory, self.headroom, self.disk)
