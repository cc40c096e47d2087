"""What the greedy walk can miss: a last look at the blocks that it left over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from anydevice.placement.tied_groups import TiedGroup

__all__ = ["promote"]

#: How many groups, of those that would fit by their bytes, are looked at closely.
_MAX_TRIED: Final = 32


def promote(
    groups: Sequence[TiedGroup],
    where: Sequence[int | None],
    largest: int,
    others: Iterable[int],
    capacities: Sequence[int],
    need: Callable[[list[int | None]], int],
    share: bool,
) -> list[int | None] | None:
    """Move one group that was left over to a device, if that breaks no law; None where none can.

    The walk asks whether a group fits next to the memory that is reserved. For the group that needs
    most of it, the question is another: does it fit next to what the *others* need? And one that
    has ties to a group which the walk placed later weighs less in the end than it did.

    Args:
        groups: all of a tier's.
        where: their devices; None for what is left over.
        largest: the group that needs the most reserved.
        others: what else to try.
        capacities: bytes of each device.
        need: bytes that the first device used reserves, when the groups are so placed.
        share: whether a device may have more than one run.
    """
    devices = range(len(capacities))
    held = _held(groups, where, len(capacities))
    left = [capacities[d] - sum(held[d].values()) for d in devices]
    moves = [(largest, d) for d in devices if groups[largest].added_to(held[d]) <= left[d]]
    main = next((d for d in where if d is not None), None)
    if main is not None:
        left[main] -= need([*where])
    fits = ((i, d) for i in others for d in devices if groups[i].added_to(held[d]) <= left[d])
    for i, device in [*moves, *itertools.islice(fits, _MAX_TRIED)]:
        moved = [*where]
        moved[i] = device
        if _is_lawful(groups, moved, device, capacities, need(moved), share):
            return moved
    return None


def _is_lawful(
    groups: Sequence[TiedGroup],
    where: Sequence[int | None],
    device: int,
    capacities: Sequence[int],
    kept: int,
    share: bool,
) -> bool:
    """Whether no budget is exceeded, and ``device`` has one run."""
    main = next(d for d in where if d is not None)
    left = [
        size - sum(held.values())
        for size, held in zip(capacities, _held(groups, where, len(capacities)), strict=True)
    ]
    left[main] -= kept
    limit = capacities[device] - (kept if device == main else 0)
    return min(left) >= 0 and (share or _one_run(groups, where, device, limit))


def _held(
    groups: Sequence[TiedGroup], where: Sequence[int | None], devices: int
) -> list[dict[int, int]]:
    """What is on each device: bytes by tensor where it is shared, the rest under -1."""
    held: list[dict[int, int]] = [{-1: 0} for _ in range(devices)]
    for group, d in zip(groups, where, strict=True):
        if d is not None:
            held[d][-1] += group.alone
            held[d].update(group.shared)
    return held


def _one_run(
    groups: Sequence[TiedGroup], where: Sequence[int | None], device: int, limit: int
) -> bool:
    """Whether between a device's groups is only what is left over and larger than ``limit``."""
    mine = [i for i, d in enumerate(where) if d == device and groups[i].size]
    between = range(mine[0], mine[-1] + 1)
    return all(
        where[i] == device or not groups[i].size or (where[i] is None and groups[i].size > limit)
        for i in between
    )
