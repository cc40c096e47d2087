"""What a form of a collective is, and what it is called with."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice_conformance.rank_kind import CARRIED

__all__ = ["MARGIN", "Form", "Members", "Place", "Tensors", "by_group_number"]

Tensors = list[torch.Tensor]

#: Elements before and behind a result.
MARGIN: Final = 5


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
        transposed: whether tensors of two dimensions are dense, and not contiguous.
        storages: each holds a tensor of a result, `MARGIN` elements after its first one.
    """

    members: Members
    root: int
    by_group: bool
    handle: bool
    device: torch.device
    transposed: bool = False
    storages: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def group(self) -> dict[str, Any]:
        """The arguments of any form."""
        return {"group": self.members.group, "async_op": self.handle}

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor of zeros for a result, between elements that nothing may write to."""
        count = like.numel()
        self.storages.append(like.new_zeros(count + 2 * MARGIN))
        return self.storages[-1][MARGIN : MARGIN + count].view(like.shape)

    def lay(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same elements, in the layout in which tensors are given."""
        if not self.transposed or tensor.dim() < 2:
            return tensor
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return self.root == self.members.rank

    def rooted(self, word: str, number: int | None = None) -> dict[str, Any]:
        """The argument that names a rank, ``src`` or ``dst``; the root where no number is given."""
        number = self.root if number is None else number
        return {f"group_{word}": number} if self.by_group else {word: self.members.ranks[number]}


@dataclasses.dataclass(frozen=True)
class Form:
    """A way to call a collective.

    Attributes:
        call: does it with this rank's tensors; returns the handles and the tensors of the result.
        gives: the result of a rank, of the tensors that all had; None where it is not said.
        tensors: how many each rank has, of the size of the group.
        summed: whether values are computed with, and not only carried.
        dtypes: that it takes.
        needed: whether a device must have it; else one that says that it does not is let off.
        paired: whether it needs two ranks.
        future: whether the handle's future holds the result.
        any_shape: whether it takes tensors of no dimensions, and of no elements.
        hosts: whether torch's own collectives of the host have it.
        laid: whether all ranks give a tensor, so that all are told where its layout is refused.
        wrong: a call that is refused on each rank, of one tensor.
    """

    call: Callable[[Place, Tensors], tuple[list[Any], Tensors]]
    gives: Callable[[Place, list[Tensors]], Tensors | None]
    tensors: Callable[[int], int] = lambda size: 1
    summed: bool = False
    dtypes: tuple[torch.dtype, ...] = CARRIED
    needed: bool = False
    paired: bool = False
    future: bool = False
    any_shape: bool = False
    hosts: bool = True
    laid: bool = False
    wrong: Callable[[Place, torch.Tensor], object] | None = None


def by_group_number() -> bool:
    """Whether this torch takes a rank's number in its group."""
    return "group_peer" in inspect.signature(dist.P2POp.__init__).parameters
