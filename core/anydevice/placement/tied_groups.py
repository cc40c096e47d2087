"""Blocks that are placed together because they are tied."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Sequence
from typing import Final

from anydevice.placement.blocks import Block, Inventory

__all__ = ["TiedGroup", "onload_bytes", "tie_blocks", "without_buffers"]

#: A block follows the one that it is tied to when at least this share of its bytes is tied.
_FOLLOWS: Final = 0.5


@dataclasses.dataclass(slots=True)
class TiedGroup:
    """Blocks that go together: one, and those that are mostly tied to it.

    Attributes:
        blocks: indices into the inventory.
        size: bytes of all distinct tensors.
        alone: of these, bytes of tensors that no other group has.
        shared: the others, as index to bytes.
        buffers: indices of its buffers.
        unit: the most bytes that one of its blocks takes when it is onloaded.
        leaf: the most bytes that one module in it takes when it is onloaded by itself.
    """

    blocks: list[int]
    size: int
    alone: int
    shared: dict[int, int]
    buffers: tuple[int, ...]
    unit: int
    leaf: int

    def added_to(self, held: Container[int]) -> int:
        """Bytes that it adds to a device that holds some tensors, by their indices."""
        if not self.shared:
            return self.alone
        return self.alone + sum(size for t, size in self.shared.items() if t not in held)


def tie_blocks(
    inventory: Inventory, offload_buffers: bool, largest: int | None = None
) -> list[TiedGroup]:
    """Join blocks that are mostly tied weights to the first block that has those.

    A group of more than ``largest`` bytes is not made: together, nothing could hold it.
    """
    sizes = inventory.sizes
    owner: dict[int, int] = {}
    members: list[list[int]] = []
    totals: list[int] = []
    for i, block in enumerate(inventory.blocks):
        tensors = (*block.parameters, *block.buffers)
        home = _followed(tensors, owner, sizes)
        extra = sum(sizes[t] for t in tensors if t not in owner)
        if home is None or (extra and largest is not None and totals[home] + extra > largest):
            home = len(members)
            members.append([])
            totals.append(sum(sizes[t] for t in tensors))
        else:
            totals[home] += extra
        members[home].append(i)
        for tensor in tensors:
            owner.setdefault(tensor, home)
    return _count(inventory, members, offload_buffers)


def _followed(tensors: Sequence[int], owner: dict[int, int], sizes: list[int]) -> int | None:
    """The group that holds most of a block's bytes already, if that is enough to follow it."""
    total = 0
    tied: dict[int, int] = {}
    for tensor in tensors:
        total += sizes[tensor]
        if tensor in owner:
            tied[owner[tensor]] = tied.get(owner[tensor], 0) + sizes[tensor]
    if not tied:
        return None
    home = max(tied, key=lambda h: tied[h])
    return home if total and tied[home] >= _FOLLOWS * total else None


def _count(
    inventory: Inventory, members: list[list[int]], offload_buffers: bool
) -> list[TiedGroup]:
    sizes, blocks = inventory.sizes, inventory.blocks
    holders = [0] * len(sizes)
    contents = []
    for group in members:
        parameters = dict.fromkeys(t for i in group for t in blocks[i].parameters)
        buffers = dict.fromkeys(t for i in group for t in blocks[i].buffers if t not in parameters)
        contents.append((parameters, buffers))
        for tensor in itertools.chain(parameters, buffers):
            holders[tensor] += 1
    groups = []
    for group, (parameters, buffers) in zip(members, contents, strict=True):
        shared = {t: sizes[t] for t in (*parameters, *buffers) if holders[t] > 1}
        size = sum(sizes[t] for t in itertools.chain(parameters, buffers))
        units = [onload_bytes(blocks[i], sizes, offload_buffers) for i in group]
        leaves = [blocks[i].leaf_buffers if offload_buffers else blocks[i].leaf for i in group]
        alone = size - sum(shared.values())
        groups.append(
            TiedGroup(group, size, alone, shared, tuple(buffers), max(units), max(leaves))
        )
    return groups


def onload_bytes(block: Block, sizes: list[int], offload_buffers: bool) -> int:
    """Bytes that a block takes on the executing device when it is onloaded."""
    size = sum(sizes[t] for t in block.parameters)
    return size + sum(sizes[t] for t in block.buffers) if offload_buffers else size


def without_buffers(group: TiedGroup, sizes: list[int]) -> TiedGroup:
    """A group as it weighs on a device that does not hold its buffers, or does in any case."""
    if not group.buffers:
        return group
    buffers = sum(sizes[t] for t in group.buffers)
    shared = {t: s for t, s in group.shared.items() if t not in group.buffers}
    size = group.size - buffers
    return dataclasses.replace(group, size=size, shared=shared, alone=size - sum(shared.values()))
