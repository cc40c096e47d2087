"""What the greedy walk can miss: lifting the one block that all the room is kept for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anydevice.placement.bundles import Bundle

__all__ = ["lift"]


def lift(
    bundles: Sequence[Bundle],
    where: Sequence[int | None],
    largest: int,
    capacities: Sequence[int],
    need: Callable[[list[int | None]], int],
    share: bool,
) -> list[int | None] | None:
    """Move one offloaded bundle to a device, if that breaks no law.

    The walk asks whether a bundle fits beside the room that is kept. For the bundle that needs most
    of it, the question is another: would it fit beside the room that the *others* need?

    Args:
        bundles: all of a tier's.
        where: their devices; None for what is left over.
        largest: the bundle to move.
        capacities: bytes of each device.
        need: bytes that the first device used keeps free, when the bundles are so placed.
        share: whether a device may have more than one run.

    Returns:
        The better placement; None when there is none.
    """
    for device in range(len(capacities)):
        moved = [*where]
        moved[largest] = device
        main = next(d for d in moved if d is not None)
        left = list(capacities)
        left[main] -= need(moved)
        for d, used in enumerate(_used(bundles, moved, len(capacities))):
            left[d] -= used
        limit = capacities[device] - (need(moved) if device == main else 0)
        if min(left) >= 0 and (share or _one_run(bundles, moved, device, limit)):
            return moved
    return None


def _used(bundles: Sequence[Bundle], where: Sequence[int | None], devices: int) -> list[int]:
    """Bytes on each device, ties once."""
    alone = [0] * devices
    shared: list[dict[int, int]] = [{} for _ in range(devices)]
    for bundle, d in zip(bundles, where, strict=True):
        if d is not None:
            alone[d] += bundle.alone
            shared[d].update(bundle.shared)
    return [size + sum(ties.values()) for size, ties in zip(alone, shared, strict=True)]


def _one_run(
    bundles: Sequence[Bundle], where: Sequence[int | None], device: int, limit: int
) -> bool:
    """Whether only what is larger than ``limit``, or nothing, stands between a device's bundles."""
    mine = [i for i, d in enumerate(where) if d == device and bundles[i].size]
    between = range(mine[0], mine[-1] + 1)
    return all(where[i] == device or not 0 < bundles[i].size <= limit for i in between)
