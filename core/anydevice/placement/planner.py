"""The planner: which block goes where.

[Note: the laws]
Blocks are taken in execution order, and each tier (accelerators, then the host, then the disk)
takes what it can before the next one does.

1. *One run a device.* An accelerator's blocks follow one another, so that activations cross to it
   once. Only a block that it could not hold even when empty, and that no other accelerator takes,
   is passed over without ending the run.
2. *No budget is exceeded.* A tied weight counts once on each device that holds a name of it.
3. *A reserve for offloaded blocks.* A block that is stored on the host or the disk is loaded onto
   the executing device when it runs. That device (the first accelerator that holds anything)
   reserves memory for the largest such block, twice when the next one is prefetched, and for the
   buffers of all of them where buffers are not offloaded. The host reserves the largest block on
   the disk.
4. *Blocks stay whole, ties stay together.* A block that is mostly tied weights goes with the one
   that it is tied to.
5. *Nothing is stored on a slower tier that could move up without breaking the above.*

How much must be reserved depends on what is offloaded, and what is offloaded on how much is
reserved. The smallest consistent reserve is found by repeating the greedy walk, first with none,
then with what the last one needed: the need grows with the reserve, so this climbs to the least
fixed point, in as many steps as there are different sizes on the way, which are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

from anydevice.placement.blocks import Inventory
from anydevice.placement.fill import fill, fits_all
from anydevice.placement.promote import promote
from anydevice.placement.reserves import Shape, Where, buffer_bytes, onloaded_bytes, settle
from anydevice.placement.tied_groups import TiedGroup, tie_blocks, without_buffers

__all__ = ["Plan", "plan_blocks"]


#: How many blocks are moved up after the walk at most; each takes a look at all of them.
_MAX_PROMOTED: Final = 64


@dataclasses.dataclass
class Plan:
    """Where the blocks go.

    Attributes:
        where: for each block, an index into the bins: accelerators, then the host, then the disk.
        tied: for each block, the one that it is placed with, as it is mostly tied to it, or None.
        main: the accelerator on which offloaded blocks run; None when there is none.
        reserve: bytes kept free for offloaded blocks, by bin; on `main` without the buffers that
            stay there.
        shape: how offloaded blocks are loaded; None when none is.
        stay: blocks whose own modules are too large for every accelerator: they run on the host.
        offload_buffers: whether buffers of offloaded blocks are stored with their parameters.
        resident: bytes of the blocks on the accelerators.
        is_tight: whether prefetching is not worth its memory.
        inventory: the blocks.
    """

    where: list[int]
    tied: list[int | None]
    main: int | None
    reserve: dict[int, int]
    shape: Shape | None
    stay: list[int]
    offload_buffers: bool
    resident: int
    is_tight: bool
    inventory: Inventory


class _BuffersDoNotFit(Exception):  # noqa: N818 - a signal between functions of this file
    """The buffers of offloaded blocks fit on no executing device."""


def plan_blocks(
    inventory: Inventory,
    accelerators: Sequence[int],
    host: int | None,
    *,
    prefetch: bool = True,
    offload_buffers: bool = False,
    share: bool = False,
) -> Plan:
    """Place the blocks of a model. What fits neither accelerators nor host goes to the disk.

    Args:
        inventory: the blocks.
        accelerators: bytes of each accelerator, fastest first.
        host: bytes of the host; None when it is not to be used.
        prefetch: reserve memory for the next offloaded block too, where that is worth it.
        offload_buffers: buffers of offloaded blocks are stored and loaded with their parameters; in
            any case where no executing device could hold them all (see `Plan.offload_buffers`).
        share: go back to a device that has space left rather than to a slower tier (breaks law 1).
    """
    task = _Task(inventory, accelerators, host, prefetch, offload_buffers, share)
    try:
        return _plan(task)
    except _BuffersDoNotFit:
        return _plan(dataclasses.replace(task, offload_buffers=True))


@dataclasses.dataclass(frozen=True)
class _Task:
    """The arguments of `plan_blocks`."""

    inventory: Inventory
    accelerators: Sequence[int]
    host: int | None
    prefetch: bool
    offload_buffers: bool
    share: bool

    def buffer_bytes(self, groups: Sequence[TiedGroup], where: Where, *, resident: bool) -> int:
        """See `reserves.buffer_bytes`; 0 where buffers are offloaded."""
        if self.offload_buffers:
            return 0
        return buffer_bytes(groups, where, self.inventory.sizes, resident=resident)

    def light(self, groups: Sequence[TiedGroup]) -> list[TiedGroup] | None:
        """The groups as they weigh where their buffers are in any case; see `fill`."""
        if self.offload_buffers:
            return None
        return [without_buffers(b, self.inventory.sizes) for b in groups]


def _plan(task: _Task) -> Plan:
    inventory, accelerators = task.inventory, task.accelerators
    largest = max(accelerators, default=task.host or 0)
    groups = tie_blocks(inventory, task.offload_buffers, largest)
    tier = _fill_accelerators(task, groups)
    rest = [i for i, d in enumerate(tier.where) if d is None]
    down, host_reserve = _fill_host(task, [groups[i] for i in rest], tier.main is not None)
    host_bin, disk_bin = len(accelerators), len(accelerators) + 1
    final = [disk_bin if d is None else d for d in tier.where]
    for i, d in zip(rest, down, strict=True):
        final[i] = disk_bin if d is None else host_bin
    where = [0] * len(inventory.blocks)
    tied: list[int | None] = [None] * len(inventory.blocks)
    for group, d in zip(groups, final, strict=True):
        for block in group.blocks:
            where[block] = d
            tied[block] = group.blocks[0] if block != group.blocks[0] else None
    reserve = {host_bin: host_reserve} if host_reserve else {}
    stay: list[int] = []
    if tier.main is not None:
        reserve[tier.main] = tier.reserve
        stay = [
            block
            for i in rest
            if groups[i].leaf > accelerators[tier.main]
            for block in groups[i].blocks
        ]
    return Plan(
        where,
        tied,
        tier.main,
        reserve,
        tier.shape,
        stay,
        task.offload_buffers,
        tier.resident,
        tier.is_tight,
        inventory,
    )


# ---------------------------------------------------------------------- the accelerators


@dataclasses.dataclass
class _Tier:
    """How the accelerators were filled; see `Plan`."""

    where: Where
    main: int | None = None
    reserve: int = 0
    shape: Shape | None = None
    resident: int = 0
    is_tight: bool = False


def _fill_accelerators(task: _Task, groups: list[TiedGroup]) -> _Tier:
    capacities = task.accelerators
    everything = fits_all(groups, capacities) if capacities else None
    if everything is not None:
        return _Tier(list(everything))
    if not any(capacities):
        return _Tier([None] * len(groups))
    shapes = [Shape(True, 2), Shape(True, 1), Shape(False, 2), Shape(False, 1)]
    best: _Tier | None = None
    for shape in shapes if task.prefetch else [s for s in shapes if s.ahead == 1]:
        tier = _with_reserve(task, groups, shape)
        if tier is None:
            continue
        if best is None or tier.resident > best.resident:
            best = tier
        if shape.whole and shape.ahead == 2 and _is_worth_it(task, tier):
            return tier
    if best is None:  # any reserve would do for the blocks, so it is the buffers
        raise _BuffersDoNotFit
    best.is_tight = True
    return best


def _is_worth_it(task: _Task, tier: _Tier) -> bool:
    """Whether prefetching is worth the memory of its two buffers.

    What they take from the weights is copied in each forward. On a small device, or where little is
    offloaded, that costs more time than the overlap saves.
    """
    if tier.main is None or not tier.resident:
        return False
    offloaded = sum(task.inventory.sizes) - tier.resident
    return 2 * tier.reserve <= task.accelerators[tier.main] and 4 * tier.reserve <= offloaded


def _with_reserve(task: _Task, groups: list[TiedGroup], shape: Shape) -> _Tier | None:
    """Fill the accelerators so that what is left over can run there; None if it cannot."""
    capacities = task.accelerators
    most = max(capacities)

    def onload(group: TiedGroup) -> int:
        return onloaded_bytes(group, shape, most)

    def for_blocks(where: Where) -> int:
        rest = (b for b, d in zip(groups, where, strict=True) if d is None)
        return shape.ahead * max(map(onload, rest), default=0)

    def need(where: Where) -> int:
        return for_blocks(where) + task.buffer_bytes(groups, where, resident=False)

    def reserve_for(where: Where) -> int:
        return for_blocks(where) + task.buffer_bytes(groups, where, resident=True)

    where, reserve = settle(groups, capacities, reserve_for, task.share, task.light(groups))
    spare = reserve - reserve_for(where)  # kept though not needed: runs were ended by it
    for step in range(_MAX_PROMOTED):
        rest = [i for i, d in enumerate(where) if d is None and groups[i].size]
        if not rest:
            break
        largest = max(rest, key=lambda i: onload(groups[i]))
        if step == 0 and not spare:  # the walk saw that the others do not fit, but for their ties
            rest = [i for i in rest if groups[i].shared]
        better = promote(groups, where, largest, rest, capacities, need, task.share)
        if better is None:
            break
        where, spare = better, 0
    main = next((d for d in where if d is not None), None)
    if main is None:
        main = next((d for d, size in enumerate(capacities) if size >= reserve), None)
        if main is None:
            return None
    resident = sum(b.size for b, d in zip(groups, where, strict=True) if d is not None)
    return _Tier(where, main, for_blocks(where) + spare, shape, resident)


# ---------------------------------------------------------------------- the host


def _fill_host(task: _Task, groups: list[TiedGroup], has_main: bool) -> tuple[Where, int]:
    """Fill the host with what the accelerators left over.

    Returns:
        0 or None (the disk) for each group, and the bytes kept free.
    """
    capacity = task.host
    if capacity is None:
        return [None] * len(groups), 0
    light = task.light(groups)
    if light is not None and has_main:  # buffers are on an accelerator
        groups, light = light, None
    everything = fill(groups, [capacity])
    if all(d is not None or not b.size for b, d in zip(groups, everything, strict=True)):
        return [0] * len(groups), 0

    def buffers(where: Where) -> int:
        return 0 if light is None else task.buffer_bytes(groups, where, resident=True)

    def need(where: Where) -> int:
        rest = (b for b, d in zip(groups, where, strict=True) if d is None)
        return max(
            (onloaded_bytes(b, Shape(True, 1), capacity) for b in rest), default=0
        ) + buffers(where)

    where, reserve = settle(groups, [capacity], need, light=light)
    if all(d is None for d in where):  # a host too small for that: better used than left empty
        where, reserve = settle(groups, [capacity], buffers, light=light)
    if reserve > capacity:
        raise _BuffersDoNotFit
    return where, reserve - buffers(where)
