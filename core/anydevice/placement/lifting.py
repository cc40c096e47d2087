"""What the greedy walk can miss: a last look at the blocks that it left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

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
    """Move one bundle that was left over to a device, if that breaks no law.

    The walk asks whether a bundle fits beside the room that is kept. For the bundle that needs most
    of it, the question is another: would it fit beside the room that the *others* need? And one
    that has ties to a bundle which the walk placed later weighs less in the end than it did.

    Args:
        bundles: all of a tier's.
        where: their devices; None for what is left over.
        largest: the bundle that needs most room.
        capacities: bytes of each device.
        need: bytes that the first device used keeps free, when the bundles are so placed.
        share: whether a device may have more than one run.

    Returns:
        The better placement; None when there is none.
    """
    for i, device in _candidates(bundles, where, largest, capacities, need):
        moved = [*where]
        moved[i] = device
        main = next(d for d in moved if d is not None)
        kept = need(moved)
        left = list(capacities)
        left[main] -= kept
        for d, held in enumerate(_held(bundles, moved, len(capacities))):
            left[d] -= sum(held.values())
        limit = capacities[device] - (kept if device == main else 0)
        if min(left) >= 0 and (share or _one_run(bundles, moved, device, limit)):
            return moved
    return None


def _candidates(
    bundles: Sequence[Bundle],
    where: Sequence[int | None],
    largest: int,
    capacities: Sequence[int],
    need: Callable[[list[int | None]], int],
) -> Iterator[tuple[int, int]]:
    """Moves worth a closer look: the largest, and what by its ties fits into what is left."""
    devices = range(len(capacities))
    yield from ((largest, d) for d in devices)
    tied = [i for i, d in enumerate(where) if d is None and bundles[i].size and bundles[i].shared]
    if not tied:
        return
    main = next((d for d in where if d is not None), None)
    held = _held(bundles, where, len(capacities))
    left = [capacities[d] - sum(held[d].values()) for d in devices]
    if main is not None:
        left[main] -= need([*where])
    for i in tied:
        for d in devices:
            new = sum(size for t, size in bundles[i].shared.items() if t not in held[d])
            if bundles[i].alone + new <= left[d]:
                yield i, d


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
