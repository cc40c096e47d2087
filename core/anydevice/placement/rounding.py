"""What devices really take for weights: their allocators round the bytes of each tensor up.

Budgets count the bytes of weights. For many small weights a device takes more than that; the plan
must not need more than there is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from anydevice import registry
from anydevice.placement.budgets import DEFAULT_HEADROOM, Budget
from anydevice.placement.planner import Plan
from anydevice.sizes import allocated_bytes

__all__ = ["plan_within_memory"]

#: Each attempt gives the devices that are too full less; few are needed.
_MAX_ATTEMPTS: Final = 8
#: A share of the weights; what was measured keeps more than that free.
_NEGLIGIBLE: Final = 0.02
#: Bytes; budgets below are of examples and not of devices.
_SMALLEST: Final = 64 << 10


def plan_within_memory(
    plan_for: Callable[[Sequence[int]], Plan],
    capacities: Sequence[int],
    budgets: Sequence[Budget],
    *,
    measured: bool,
) -> Plan:
    """Plan so that what each accelerator takes, with rounding, is no more than it has.

    Args:
        plan_for: plans with bytes of each accelerator.
        capacities: these bytes.
        budgets: what the accelerators have.
        measured: whether the budgets are what was free; else the user gave them, for devices that
            need not be of this machine.
    """
    capacities = list(capacities)
    plan = plan_for(capacities)
    for _ in range(_MAX_ATTEMPTS):
        too_full = False
        for device, budget in enumerate(budgets):
            used, taken = _used(plan, device)
            reserve = _reserve(plan, device, len(budgets))
            if taken - used <= _NEGLIGIBLE * used:
                continue
            limit = (budget.size or 0) if measured else _free(budget)
            if limit is None or limit < _SMALLEST:
                continue
            if used <= limit < taken + reserve:
                room = max(0, limit - reserve)
                capacities[device] = plan.reserve.get(device, 0) + used * room // taken
                too_full = True
        if not too_full:
            break
        plan = plan_for(capacities)
    return plan


def _used(plan: Plan, device: int) -> tuple[int, int]:
    """Bytes of the weights on a device, and what it takes for them."""
    blocks = plan.inventory.blocks
    sizes = plan.inventory.sizes
    held: set[int] = set()
    for block, where in zip(blocks, plan.where, strict=True):
        if where == device:
            held.update(block.parameters)
        if where == device or (device == plan.main and not plan.offload_buffers):
            held.update(block.buffers)
    return sum(sizes[t] for t in held), sum(allocated_bytes(sizes[t]) for t in held)


def _reserve(plan: Plan, device: int, accelerators: int) -> int:
    """Bytes that a device takes for the offloaded blocks that run on it."""
    reserve = plan.reserve.get(device, 0)
    if plan.shape is None or not plan.shape.whole or device != plan.main:
        return reserve
    sizes = plan.inventory.sizes
    visitors = [
        sum(allocated_bytes(sizes[t]) for t in block.parameters)
        for block, where in zip(plan.inventory.blocks, plan.where, strict=True)
        if where >= accelerators
    ]
    return max(reserve, plan.shape.ahead * max(visitors, default=0))


def _free(budget: Budget) -> int | None:
    """What the device has for weights, if it is here and says so."""
    try:
        free = registry.measure_memory(str(budget.device)).free
        return free - int(free * DEFAULT_HEADROOM)
    except Exception:  # noqa: BLE001 - not here, or a vendor's query that fails in any way
        return None
