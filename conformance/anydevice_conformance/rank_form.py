"""What a form of a collective is, and what it is called with."""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_kind import CARRIED
from anydevice_conformance.rank_layouts import Room, room
from anydevice_conformance.rank_operations import OPERATIONS, Operation

__all__ = ["Form", "Members", "Place", "Tensors", "by_group_number", "joined", "works"]

Tensors = list[torch.Tensor]
#: Carried by many devices, and refused by others.
_RARE: Final = (torch.int16, torch.complex64, torch.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class Members:
    """A group, as one of its ranks sees it.

    Attributes:
        group: of `torch.distributed`; None for the default one.
        ranks: its members, as numbers of the default group.
        rank: this one's number in the group.
    """

    group: Any
    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """How many members it has."""
        return len(self.ranks)


@dataclasses.dataclass(frozen=True)
class Place:
    """What a form is called with besides its tensors.

    Attributes:
        members: of the group.
        root: the number in the group of the rank that sends to all, or gets from all.
        by_group: whether that number is given, and not the one in the default group.
        handle: whether it is called with ``async_op``.
        device: of the tensors.
        seed: of what a form chooses.
        layout: in which this rank's tensors are given.
        layout_out: in which this rank's results are taken.
        operation: how values are combined.
        offset: elements before the tensors in their storages, besides the usual ones.
        rooms: of the tensors, each between elements that nothing may write to.
        given: what was given to the collective besides the rank's tensors, and what it held.
    """

    members: Members
    root: int
    by_group: bool
    handle: bool
    device: torch.device
    seed: int = 0
    layout: str = "plain"
    layout_out: str = "plain"
    operation: Operation = OPERATIONS["sum"]
    offset: int = 0
    rooms: list[Room] = dataclasses.field(default_factory=list)
    given: list[tuple[torch.Tensor, torch.Tensor]] = dataclasses.field(default_factory=list)

    @property
    def group(self) -> dict[str, Any]:
        """The arguments of any form."""
        return {"group": self.members.group, "async_op": self.handle}

    def room(self, like: torch.Tensor, layout: str = "") -> torch.Tensor:
        """A tensor of zeros, as for a result, in a layout; that of results where none is given."""
        self.rooms.append(room(like, layout or self.layout_out, self.offset))
        return self.rooms[-1].tensor

    def give(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements, in the layout in which they are given; they must stay as they are."""
        laid = self.room(tensor, self.layout)
        laid.copy_(tensor)
        self.given.append((laid, tensor))
        return laid

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.root == self.members.rank

    def rooted(self, word: str, number: int | None = None) -> dict[str, Any]:
        """The argument that names a rank, ``src`` or ``dst``; the root where no number is given."""
        number = self.root if number is None else number
        return {f"group_{word}": number} if self.by_group else {word: self.members.ranks[number]}

    def splits(self, most: int) -> list[list[int]]:
        """How many rows each rank sends to each, at most so many; the same for all ranks."""
        dice, size = random.Random(self.seed), self.members.size
        return [[dice.randint(0, most) for _ in range(size)] for _ in range(size)]


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to call a collective.

    Attributes:
        call: does it with this rank's tensors; returns the handles and the tensors of the result.
        gives: the result of a rank, of the tensors that all had; None where it is not said.
        tensors: how many each rank has, of the size of the group.
        operations: names of those that it combines values by; none where it only carries.
        dtypes: that it takes.
        rare: dtypes that it may refuse.
        needed: whether a device must have it; else one that says that it does not is let off.
        paired: whether it needs two ranks.
        future: whether the handle's future holds the result.
        any_shape: whether it takes tensors of no dimensions, and of no elements.
        empty: whether it takes tensors of no elements.
        hosts: whether torch's own collectives of the host have it.
        hosts_laid: whether these take it in any dense layout.
        laid: whether all ranks give a tensor, so that all are told where its layout is refused.
        laid_out: whether all ranks get a tensor, so that all are told of its layout, too.
        wrong: a call that is refused on each rank, of one tensor.
    """

    call: Callable[[Place, Tensors], tuple[list[Any], Tensors]]
    gives: Callable[[Place, list[Tensors]], Tensors | None]
    tensors: Callable[[int], int] = lambda size: 1
    operations: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = CARRIED
    rare: tuple[torch.dtype, ...] = _RARE
    needed: bool = False
    paired: bool = False
    future: bool = False
    any_shape: bool = False
    empty: bool = False
    hosts: bool = True
    hosts_laid: bool = False
    laid: bool = False
    laid_out: bool = False
    wrong: Callable[[Place, torch.Tensor], object] | None = None


def by_group_number() -> bool:
    """Whether this torch takes a rank's number in its group."""
    return "group_peer" in inspect.signature(dist.P2POp.__init__).parameters


def works(work: Any) -> list[Any]:
    """The handle, if there is one."""
    return [work] if work is not None else []


def joined(tensors: Tensors, flat: bool = True) -> torch.Tensor:
    """The ranks' tensors one after another, or stacked."""
    stacked = torch.stack(tensors)
    return stacked.flatten(0, 1) if flat and stacked.dim() > 1 else stacked
