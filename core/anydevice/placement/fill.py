"""One tier of devices is filled in one walk."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Final

from anydevice.placement.tied_groups import TiedGroup

__all__ = ["covers", "fill", "fits_all", "prefix_sums"]

#: With more devices than this, their orders are not searched.
_MAX_ORDERED: Final = 8


def fill(
    groups: Sequence[TiedGroup],
    capacities: Sequence[int],
    reserve: int = 0,
    share: bool = False,
    light: Sequence[TiedGroup] | None = None,
) -> list[int | None]:
    """Fill the devices of a tier, in order, with groups, in order.

    Args:
        groups: what is to be placed.
        capacities: bytes of each device.
        reserve: bytes to keep free on the first device that takes anything.
        share: let a group that does not fit go back to a device that the walk has left.
        light: the groups as they weigh on the first device, where that holds their buffers in any
            case (and ``reserve`` counts those).

    Returns:
        For each group the device's index, or None. What holds no bytes goes with its neighbour.
    """
    walk = _Walk(capacities, reserve, share)
    where: list[int | None] = []
    for i, group in enumerate(groups):
        if group.size:
            where.append(walk.place(group, group if light is None else light[i]))
        else:
            where.append(where[-1] if where else None)
    first = next((i for i, b in enumerate(groups) if b.size), None)
    if first is not None:  # empty ones at the front go with the first that holds something
        where[:first] = [where[first]] * first
    return where


class _Walk:
    """The devices of a tier while they are filled."""

    def __init__(self, capacities: Sequence[int], reserve: int, share: bool) -> None:
        self.reserve, self.share = reserve, share
        #: Bytes that a device can take when empty, and that it can take now.
        self.whole, self.left = list(capacities), list(capacities)
        self.held: list[set[int]] = [set() for _ in capacities]
        self.unused = list(range(len(capacities)))
        self.closed: list[int] = []
        self.main: int | None = None
        self.current: int | None = None  # where the run is

    def place(self, group: TiedGroup, light: TiedGroup) -> int | None:
        """Take the next group; None when no device can."""
        current = self.current
        if current is not None:
            weight = light if current == self.main else group
            if self._fits(weight, current):
                return self._take(weight, current)
        if (device := self._open(group, light)) is not None:
            return device
        if self.share:
            for device in self.closed:
                weight = light if device == self.main else group
                if self._fits(weight, device):
                    return self._take(weight, device)
        elif current is not None and weight.size <= self.whole[current]:
            self.closed.append(current)  # full, not passed over: the run ends
            self.current = None
        return None

    def _open(self, group: TiedGroup, light: TiedGroup) -> int | None:
        """Begin a run on the first unused device that can hold a group."""
        first = self.main is None
        weight, spare = (light, self.reserve) if first else (group, 0)
        device = next((d for d in self.unused if weight.size <= self.whole[d] - spare), None)
        if device is None:
            return None
        if first:
            self.main = device
            self.whole[device] -= spare
            self.left[device] -= spare
        if self.current is not None:
            self.closed.append(self.current)
        self.current = device
        self.unused.remove(device)
        return self._take(weight, device)

    def _fits(self, group: TiedGroup, device: int) -> bool:
        return group.added_to(self.held[device]) <= self.left[device]

    def _take(self, group: TiedGroup, device: int) -> int:
        self.left[device] -= group.added_to(self.held[device])
        self.held[device].update(group.shared)
        return device


def fits_all(groups: Sequence[TiedGroup], capacities: Sequence[int]) -> list[int] | None:
    """Place all groups on the devices of one tier, or say None.

    The devices are used in the order given where that works, else in any order that does.
    """
    where = fill(groups, capacities)
    if _complete(groups, where):
        return [d or 0 for d in where]  # where nothing holds a byte: the first device
    order = _order_that_fits(groups, capacities)
    if order is None:
        return None
    where = fill(groups, [capacities[d] for d in order])
    return [order[d or 0] for d in where] if _complete(groups, where) else None


def _complete(groups: Sequence[TiedGroup], where: Sequence[int | None]) -> bool:
    return all(d is not None or not b.size for b, d in zip(groups, where, strict=True))


def prefix_sums(groups: Sequence[TiedGroup]) -> list[int]:
    """Bytes of the first 0, 1, 2, ... groups."""
    return list(itertools.accumulate((b.size for b in groups), initial=0))


def covers(ends: Sequence[int], capacities: Sequence[int]) -> bool:
    """Whether `fill` would place all groups, judged by their prefix sums alone.

    Ties that would save bytes are not seen, so a True holds and a False may be too careful.
    """
    unused = list(capacities)
    start, last = 0, bisect.bisect_left(ends, ends[-1])
    while start < last:
        # Empty groups go along: what counts is the next one that holds something.
        start = bisect.bisect_right(ends, ends[start]) - 1
        size = ends[start + 1] - ends[start]
        device = next((i for i, capacity in enumerate(unused) if size <= capacity), None)
        if device is None:
            return False
        start = bisect.bisect_right(ends, ends[start] + unused.pop(device)) - 1
    return True


def _order_that_fits(groups: Sequence[TiedGroup], capacities: Sequence[int]) -> list[int] | None:
    """An order of devices in which one run on each covers all groups.

    ``reach[used]`` is how many groups the devices in the set ``used`` can cover, in their best
    order; it follows from the sets with one device less.
    """
    devices = range(len(capacities))
    ends = prefix_sums(groups)
    if not 1 < len(capacities) <= _MAX_ORDERED or ends[-1] > sum(capacities):
        return None
    reach: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for used in range(1, 1 << len(capacities)):
        best: tuple[int, list[int]] = (-1, [])
        for d in devices:
            if used >> d & 1:
                start, order = reach[used & ~(1 << d)]
                end = bisect.bisect_right(ends, ends[start] + capacities[d]) - 1
                best = max(best, (end, [*order, d]), key=lambda pair: pair[0])
        reach[used] = best
    covered, order = reach[(1 << len(capacities)) - 1]
    return order if covered == len(groups) else None
