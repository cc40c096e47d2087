"""Budgets that spread a model evenly over the accelerators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

from anydevice.devices import parse_device
from anydevice.dtypes import DtypeLike
from anydevice.placement.blocks import Inventory, take_inventory
from anydevice.placement.budgets import get_max_memory
from anydevice.placement.fill import covers, prefix_sums
from anydevice.placement.tied_groups import tie_blocks

__all__ = ["balance", "get_balanced_memory"]


def get_balanced_memory(
    model: nn.Module,
    max_memory: Mapping[Any, int | str] | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    low_zero: bool = False,
) -> dict[int | str, int]:
    """Lower the budgets of the accelerators so that `infer_auto_device_map` fills them evenly.

    The budgets are the lowest equal ones under which the model still fits, with its blocks whole;
    the last accelerator keeps its own, so that nothing is squeezed out. A model that does not fit
    on the accelerators needs every byte of them: the budgets are then returned as they are.

    Args:
        model: on any device, meta too.
        max_memory: budgets by device; by default what is free. Not changed.
        no_split_module_classes: names of classes that stay whole; by default they are found.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        low_zero: place as little as possible on the first accelerator, for the caller's other work.

    Returns:
        Bytes by device, as the caller spells them.

    Raises:
        BudgetError: a budget cannot be read.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import get_balanced_memory
        >>> get_balanced_memory(nn.Linear(2, 2), max_memory={"cpu": 1024})
        {'cpu': 1024}
    """
    budgets = get_max_memory(max_memory)
    keys = [k for k, size in budgets.items() if size and parse_device(k).is_accelerator]
    if len(keys) < 2:
        return budgets
    own = [budgets[key] for key in keys]
    inventory = take_inventory(model, no_split_module_classes, dtype, special_dtypes, max(own))
    budgets.update(zip(keys, balance(inventory, own, low_zero=low_zero), strict=True))
    return budgets


def balance(inventory: Inventory, own: Sequence[int], *, low_zero: bool) -> list[int]:
    """Lower the budgets of accelerators, ``own``, in bytes; see `get_balanced_memory`."""
    if len(own) < 2:
        return list(own)
    ends = prefix_sums(tie_blocks(inventory, False, max(own)))
    if not covers(ends, own):
        return list(own)
    first = own[0]
    if low_zero:
        first = _lowest(own[0], lambda size: covers(ends, [size, *own[1:]]))

    def capped(cap: int) -> list[int]:
        capped_first = first if low_zero else min(first, cap)
        return [capped_first, *(min(size, cap) for size in own[1:])]

    cap = _lowest(max(own), lambda size: covers(ends, capped(size)))
    return [*capped(cap)[:-1], own[-1]]


def _lowest(highest: int, works: Callable[[int], bool]) -> int:
    """The lowest number up to ``highest`` that works, where ``highest`` does."""
    low, high = 0, highest
    while low < high:
        middle = (low + high) // 2
        if works(middle):
            high = middle
        else:
            low = middle + 1
    return low
