"""The planner: which block goes where.

[Note: the laws]
Blocks are taken in execution order, and each tier (accelerators, then the host, then the disk)
takes what it can before the next one does.

1. *One run a device.* An accelerator's blocks follow one another, so that activations cross to it
   once. Only a block that it could not hold even when empty, and that no other accelerator takes,
   is passed over without ending the run.
2. *No budget is exceeded.* A tied weight counts once on each device that holds a name of it.
3. *Room for visitors.* A block that rests on the host or the disk is brought to the executing
   device when it runs. That device (the first accelerator that holds anything) keeps room for the
   largest such block, twice when the next one is fetched ahead, and for the buffers of all of them
   where buffers are not offloaded. The host keeps room for the largest block on the disk.
4. *Blocks stay whole, ties stay together.* A block that is mostly tied weights goes with the one
   that it is tied to.
5. *Nothing rests on a slower tier that could move up without breaking the above.*

How much room is needed depends on what is offloaded, and what is offloaded on how much room is
kept. The smallest room that agrees with itself is found by beginning with none and repeating the
greedy walk with the need that the last one showed: need grows with room, so this climbs to the
least fixed point, in as many steps as there are different sizes on the way, which are few.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from anydevice.placement.blocks import Inventory
from anydevice.placement.bundles import Bundle, bundle_blocks, without_buffers
from anydevice.placement.filling import fill, fits_all
from anydevice.placement.lifting import lift

__all__ = ["Plan", "Shape", "plan_blocks"]

#: How many blocks are moved up after the walk at most; each takes a look at all of them.
_MAX_LIFTS: Final = 64

Where: TypeAlias = list[int | None]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How offloaded blocks visit the executing device.

    Attributes:
        whole: as whole blocks; else those that are too large come module by module.
        ahead: how many are there at once: 2 when the next one is fetched ahead.
    """

    whole: bool
    ahead: int


@dataclasses.dataclass
class Plan:
    """Where the blocks go.

    Attributes:
        where: for each block, an index into the bins: accelerators, then the host, then the disk.
        tied: for each block, the one that it was put beside as it is mostly tied to it, or None.
        main: the accelerator on which offloaded blocks run; None when there is none.
        room: bytes kept free for visitors, by bin; on `main` without the buffers that stay there.
        shape: how blocks visit; None when nothing has to.
        stay: blocks whose own modules no accelerator has room for: they run on the host.
        offload_buffers: whether buffers of offloaded blocks rest with their parameters.
    """

    where: list[int]
    tied: list[int | None]
    main: int | None
    room: dict[int, int]
    shape: Shape | None
    stay: list[int]
    offload_buffers: bool


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
        prefetch: keep room for the next visiting block too, where there is enough.
        offload_buffers: buffers of offloaded blocks rest and travel with their parameters. They do
            in any case where no executing device could hold them all (see `Plan.offload_buffers`).
        share: go back to a device that has space left rather than to a slower tier (breaks law 1).
    """
    try:
        return _plan(inventory, accelerators, host, prefetch, offload_buffers, share)
    except _BuffersDoNotFit:
        return _plan(inventory, accelerators, host, prefetch, True, share)


def _plan(
    inventory: Inventory,
    accelerators: Sequence[int],
    host: int | None,
    prefetch: bool,
    offload_buffers: bool,
    share: bool,
) -> Plan:
    largest = max(accelerators, default=host or 0)
    bundles = bundle_blocks(inventory, offload_buffers, largest)
    tier = _fill_accelerators(
        bundles, inventory.sizes, accelerators, prefetch, offload_buffers, share
    )
    rest = [i for i, d in enumerate(tier.where) if d is None]
    down, host_room = _fill_host(
        [bundles[i] for i in rest], inventory.sizes, host, offload_buffers, tier.main is not None
    )
    host_bin, disk_bin = len(accelerators), len(accelerators) + 1
    final = [disk_bin if d is None else d for d in tier.where]
    for i, d in zip(rest, down, strict=True):
        final[i] = disk_bin if d is None else host_bin
    where = [0] * len(inventory.blocks)
    tied: list[int | None] = [None] * len(inventory.blocks)
    for bundle, d in zip(bundles, final, strict=True):
        for block in bundle.blocks:
            where[block] = d
            tied[block] = bundle.blocks[0] if block != bundle.blocks[0] else None
    room = {host_bin: host_room} if host_room else {}
    stay: list[int] = []
    if tier.main is not None:
        room[tier.main] = tier.room
        stay = [
            block
            for i in rest
            if bundles[i].leaf > accelerators[tier.main]
            for block in bundles[i].blocks
        ]
    return Plan(where, tied, tier.main, room, tier.shape, stay, offload_buffers)


# ---------------------------------------------------------------------- the accelerators


@dataclasses.dataclass
class _Tier:
    """How the accelerators were filled; see `Plan`."""

    where: Where
    main: int | None = None
    room: int = 0
    shape: Shape | None = None
    resident: int = 0


def _fill_accelerators(
    bundles: list[Bundle],
    sizes: list[int],
    capacities: Sequence[int],
    prefetch: bool,
    offload_buffers: bool,
    share: bool,
) -> _Tier:
    everything = fits_all(bundles, capacities) if capacities else None
    if everything is not None:
        return _Tier(list(everything))
    if not any(capacities):
        return _Tier([None] * len(bundles))
    shapes = [Shape(True, 2), Shape(True, 1), Shape(False, 2), Shape(False, 1)]
    best: _Tier | None = None
    for shape in shapes if prefetch else [s for s in shapes if s.ahead == 1]:
        tier = _with_room(bundles, sizes, capacities, shape, offload_buffers, share)
        if tier is None:
            continue
        if best is None or tier.resident > best.resident:
            best = tier
        assert best.main is not None
        if best.resident and 2 * best.room <= capacities[best.main]:
            break  # room enough, at little cost
    if best is None:  # any room for visitors would do, so it is the buffers
        raise _BuffersDoNotFit
    return best


def _with_room(
    bundles: list[Bundle],
    sizes: list[int],
    capacities: Sequence[int],
    shape: Shape,
    offload_buffers: bool,
    share: bool,
) -> _Tier | None:
    """Fill the accelerators so that what is left over can visit; None if it cannot."""
    most = max(capacities)
    light = None if offload_buffers else [without_buffers(b, sizes) for b in bundles]

    def visitor(bundle: Bundle) -> int:
        return _visits(bundle, shape, most)

    def room(where: Where) -> int:
        rest = (b for b, d in zip(bundles, where, strict=True) if d is None)
        return shape.ahead * max(map(visitor, rest), default=0)

    def kept(where: Where) -> int:
        return 0 if offload_buffers else _buffers(bundles, where, sizes, resident=False)

    def need(where: Where) -> int:
        return room(where) + kept(where)

    def reserve_for(where: Where) -> int:
        buffers = 0 if offload_buffers else _buffers(bundles, where, sizes, resident=True)
        return room(where) + buffers

    where, reserve = _settle(bundles, capacities, reserve_for, share, light)
    spare = reserve - reserve_for(where)  # kept though not needed: runs were ended by it
    for step in range(_MAX_LIFTS):
        rest = [i for i, d in enumerate(where) if d is None and bundles[i].size]
        if not rest:
            break
        largest = max(rest, key=lambda i: visitor(bundles[i]))
        if step == 0 and not spare:  # the walk saw that the others do not fit, but for their ties
            rest = [i for i in rest if bundles[i].shared]
        better = lift(bundles, where, largest, rest, capacities, need, share)
        if better is None:
            break
        where, spare = better, 0
    main = next((d for d in where if d is not None), None)
    if main is None:
        main = next((d for d, size in enumerate(capacities) if size >= reserve), None)
        if main is None:
            return None
    resident = sum(b.size for b, d in zip(bundles, where, strict=True) if d is not None)
    return _Tier(where, main, room(where) + spare, shape, resident)


def _settle(
    bundles: Sequence[Bundle],
    capacities: Sequence[int],
    need: Callable[[Where], int],
    share: bool = False,
    light: Sequence[Bundle] | None = None,
) -> tuple[Where, int]:
    """Fill a tier so that the first device used keeps the room that what is left over needs.

    Returns:
        Where the bundles go, and the bytes kept.
    """
    reserve = 0
    while True:
        where = fill(bundles, capacities, reserve, share, light)
        wanted = need(where)
        if wanted <= reserve:
            return where, reserve
        reserve = wanted


def _visits(bundle: Bundle, shape: Shape, most: int) -> int:
    """Bytes that one bundle brings at once to a device of at most ``most`` bytes.

    One of which even a single module is too large never visits, and brings nothing.
    """
    unit = bundle.unit if shape.whole and bundle.unit <= most else bundle.leaf
    return unit if unit <= most else 0


def _buffers(bundles: Sequence[Bundle], where: Where, sizes: list[int], *, resident: bool) -> int:
    """Bytes of the buffers of what is left over, which stay on the first device used.

    Args:
        bundles: all of a tier's.
        where: their devices.
        sizes: bytes of each tensor.
        resident: count the buffers of what rests on that device too; else only what is added to it.
    """
    if not any(b.buffers for b in bundles):
        return 0
    main = next((d for d in where if d is not None), None)
    kept: set[int] = set()
    there: set[int] = set()
    for bundle, d in zip(bundles, where, strict=True):
        if d is None or (resident and d == main):
            kept.update(bundle.buffers)
        if d is not None and d == main:
            there.update(t for t in bundle.shared if not resident or t not in bundle.buffers)
    return sum(sizes[t] for t in kept - there)


# ---------------------------------------------------------------------- the host


def _fill_host(
    bundles: list[Bundle],
    sizes: list[int],
    capacity: int | None,
    offload_buffers: bool,
    has_main: bool,
) -> tuple[Where, int]:
    """Fill the host with what the accelerators left over.

    Returns:
        0 or None (the disk) for each bundle, and the bytes kept free.
    """
    if capacity is None:
        return [None] * len(bundles), 0
    light = None if offload_buffers else [without_buffers(b, sizes) for b in bundles]
    if light is not None and has_main:  # buffers are on an accelerator
        bundles, light = light, None
    everything = fill(bundles, [capacity])
    if all(d is not None or not b.size for b, d in zip(bundles, everything, strict=True)):
        return [0] * len(bundles), 0

    def buffers(where: Where) -> int:
        return 0 if light is None else _buffers(bundles, where, sizes, resident=True)

    def need(where: Where) -> int:
        rest = (b for b, d in zip(bundles, where, strict=True) if d is None)
        return max((_visits(b, Shape(True, 1), capacity) for b in rest), default=0) + buffers(where)

    where, reserve = _settle(bundles, [capacity], need, light=light)
    if all(d is None for d in where):  # a host too small for that: better used than left empty
        where, reserve = _settle(bundles, [capacity], buffers, light=light)
    if reserve > capacity:
        raise _BuffersDoNotFit
    return where, reserve - buffers(where)
