"""Memory reserved for offloaded blocks, and the smallest reserve that is consistent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias

from anydevice.placement.fill import fill
from anydevice.placement.tied_groups import TiedGroup

__all__ = ["Shape", "Where", "buffer_bytes", "onloaded_bytes", "settle"]

Where: TypeAlias = list[int | None]


@dataclasses.dataclass(frozen=True)
class Shape:
    """How offloaded blocks are loaded onto the executing device.

    Attributes:
        whole: as whole blocks; else those that are too large, module by module.
        ahead: how many are there at once: 2 when the next one is prefetched.
    """

    whole: bool
    ahead: int


def settle(
    groups: Sequence[TiedGroup],
    capacities: Sequence[int],
    need: Callable[[Where], int],
    share: bool = False,
    light: Sequence[TiedGroup] | None = None,
) -> tuple[Where, int]:
    """Fill a tier so that the first device used reserves what the blocks left over need.

    Returns:
        Where the groups go, and the bytes kept.
    """
    reserve = 0
    while True:
        where = fill(groups, capacities, reserve, share, light)
        wanted = need(where)
        if wanted <= reserve:
            return where, reserve
        reserve = wanted


def onloaded_bytes(group: TiedGroup, shape: Shape, most: int) -> int:
    """Bytes that one group needs at once to a device of at most ``most`` bytes.

    One of which even a single module is too large is never loaded, and needs nothing.
    """
    unit = group.unit if shape.whole and group.unit <= most else group.leaf
    return unit if unit <= most else 0


def buffer_bytes(
    groups: Sequence[TiedGroup], where: Where, sizes: list[int], *, resident: bool
) -> int:
    """Bytes of the buffers of what is left over, which stay on the first device used.

    With ``resident`` those of what is stored there count too; else only what is added to it.
    """
    if not any(b.buffers for b in groups):
        return 0
    main = next((d for d in where if d is not None), None)
    kept: set[int] = set()
    there: set[int] = set()
    for group, d in zip(groups, where, strict=True):
        if d is None or (resident and d == main):
            kept.update(group.buffers)
        if d is not None and d == main:
            there.update(t for t in group.shared if not resident or t not in group.buffers)
    return sum(sizes[t] for t in kept - there)
