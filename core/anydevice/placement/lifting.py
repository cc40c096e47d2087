"""What the greedy walk can miss: a last look at the blocks that it left over."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from anydevice.placement.bundles import Bundle

__all__ = ["lift"]

#: How many bundles, of those that would fit by their bytes, are looked at closely.
_MAX_TRIED: Final = 32


def lift(
    bundles: Sequence[Bundle],
    where: Sequence[int | None],
    largest: int,
    others: Iterable[int],
    capacities: Sequence[int],
    need: Callable[[list[int | None]], int],
    share: bool,
) -> list[int | None] | None:
    """Move one bundle that was left over to a device, if that breaks no law.

    The walk asks whether a bundle fits beside the room that is kept. For the bundle that needs most
    of it, the question is another: would it fit beside the room that the *others* need? And one
    that has ties to a bundle which the walk placed later weighs less in the end than it did.

    Args:
        bundles: all of a tier's.
        where: their devices; None for what is left over.
        largest: the bundle that needs most room.
        others: what else to try.
        capacities: bytes of each device.
        need: bytes that the first device used keeps free, when the bundles are so placed.
        share: whether a device may have more than one run.

    Returns:
        The better placement; None when there is none.
    """
    devices = range(len(capacities))
    held = _held(bundles, where, len(capacities))
    left = [capacities[d] - sum(held[d].values()) for d in devices]
    moves = [(largest, d) for d in devices if _added(bundles[largest], held[d]) <= left[d]]
    main = next((d for d in where if d is not None), None)
    if main is not None:
        left[main] -= need([*where])
    fits = ((i, d) for i in others for d in devices if _added(bundles[i], held[d]) <= left[d])
    for i, device in [*moves, *itertools.islice(fits, _MAX_TRIED)]:
        moved = [*where]
        moved[i] = device
        if _is_lawful(bundles, moved, device, capacities, need(moved), share):
            return moved
    return None


def _added(bundle: Bundle, held: dict[int, int]) -> int:
    """Bytes that a bundle adds to a device."""
    return bundle.alone + sum(size for t, size in bundle.shared.items() if t not in held)


def _is_lawful(
    bundles: Sequence[Bundle],
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
        for size, held in zip(capacities, _held(bundles, where, len(capacities)), strict=True)
    ]
    left[main] -= kept
    limit = capacities[device] - (kept if device == main else 0)
    return min(left) >= 0 and (share or _one_run(bundles, where, device, limit))


def _held(
    bundles: Sequence[Bundle], where: Sequence[int | None], devices: int
) -> list[dict[int, int]]:
    """What is on each device: bytes by tensor where it is shared, the rest under -1."""
    held: list[dict[int, int]] = [{-1: 0} for _ in range(devices)]
    for bundle, d in zip(bundles, where, strict=True):
        if d is not None:
            held[d][-1] += bundle.alone
            held[d].update(bundle.shared)
    return held


def _one_run(
    bundles: Sequence[Bundle], where: Sequence[int | None], device: int, limit: int
) -> bool:
    """Whether between a device's bundles is only what is left over and larger than ``limit``."""
    mine = [i for i, d in enumerate(where) if d == device and bundles[i].size]
    between = range(mine[0], mine[-1] + 1)
    return all(
        where[i] == device or not bundles[i].size or (where[i] is None and bundles[i].size > limit)
        for i in between
    )
