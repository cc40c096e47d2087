"""How a group's weights lie in one buffer on the device, and in which copies they get there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from anydevice.devices import CPU
from anydevice.tensors import is_dense
from anydevice.transfer.device_copy import is_lazy, moves_by_itself
from anydevice.transfer.pinned_blocks import block_of

__all__ = [
    "ALIGNMENT",
    "CopyPlan",
    "Piece",
    "Run",
    "align",
    "bytes_of",
    "count_owners",
    "is_copied_as_bytes",
    "plan_copies",
    "signature",
    "tensor_at",
]

#: Every run begins at a multiple of this many bytes, as allocators of devices have it.
ALIGNMENT: Final = 256
#: Weights that lie one after the other on the host are copied at once where kernels would not
#: notice: they keep at least this alignment...
_KEPT_ALIGNMENT: Final = 64
#: ... and at most so many bytes between them are copied for nothing.
_GAP: Final = 4096


class Piece(NamedTuple):
    """A weight's bytes in the buffer.

    Attributes:
        weight: its index.
        offset: in the buffer.
        nbytes: how many.
    """

    weight: int
    offset: int
    nbytes: int


class Run(NamedTuple):
    """A range of host memory that is copied at once.

    Attributes:
        weight: index of the one at which it begins.
        offset: in the buffer.
        nbytes: how many.
        pinned: whether it is page-locked.
    """

    weight: int
    offset: int
    nbytes: int
    pinned: bool

    def copy(self, weights: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        """Queue its copy into the buffer's bytes on the current stream."""
        source = bytes_of(weights[self.weight], self.nbytes)
        flat.narrow(0, self.offset, self.nbytes).copy_(source, non_blocking=True)


class CopyPlan(NamedTuple):
    """Where the weights of a group go.

    Attributes:
        nbytes: of the buffer.
        pieces: the weights in it.
        runs: the copies that fill it.
        loose: indices of weights that must be copied one by one.
    """

    nbytes: int
    pieces: list[Piece]
    runs: list[Run]
    loose: list[int]

    @property
    def padding(self) -> int:
        """Bytes of the buffer that are no weight's."""
        return max(0, self.nbytes - sum(piece.nbytes for piece in self.pieces))


def signature(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What a layout depends on: another signature, another layout."""
    kind = type(tensor)
    if kind is not nn.Parameter and kind is not torch.Tensor and not is_copied_as_bytes(tensor):
        return (id(tensor),)
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    return (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def plan_copies(
    originals: Sequence[torch.Tensor], pins: bool, alone: Sequence[int] = ()
) -> CopyPlan:
    """Lay distinct weights out in one buffer, each with its own strides.

    ``pins`` says whether the device knows page-locked memory; those at the indices ``alone`` must
    be copied one by one.
    """
    loose = [i for i, t in enumerate(originals) if i in alone or not is_copied_as_bytes(t)]
    order = sorted(
        set(range(len(originals))).difference(loose), key=lambda i: originals[i].data_ptr()
    )
    pieces: list[Piece] = []
    runs: list[Run] = []
    owner = start = end = -1  # of the current run, on the host
    for i in order:
        tensor = originals[i]
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        joins = (
            _owner(tensor) == owner
            and address - end <= _GAP
            and (address - start) % _KEPT_ALIGNMENT == 0
        )
        if joins:
            run = runs[-1]
            pieces.append(Piece(i, run.offset + address - start, nbytes))
            end = max(end, address + nbytes)
            runs[-1] = run._replace(nbytes=end - start)
        else:
            offset = align(runs[-1].offset + runs[-1].nbytes) if runs else 0
            pieces.append(Piece(i, offset, nbytes))
            runs.append(Run(i, offset, nbytes, pins and tensor.is_pinned()))
            owner, start, end = _owner(tensor), address, address + nbytes
    total = align(runs[-1].offset + runs[-1].nbytes) if runs else 0
    return CopyPlan(total, pieces, runs, loose)


def bytes_of(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    """View host memory, from a tensor's first byte on, as bytes."""
    block = block_of(tensor)
    if block is not None:
        return block.narrow(0, tensor.data_ptr() - block.data_ptr(), nbytes)
    view = torch.empty(0, dtype=torch.uint8, device="cpu")
    start = tensor.storage_offset() * tensor.element_size()
    return view.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def tensor_at(flat: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """View a buffer's bytes as a tensor with the dtype, shape and strides of another.

    It has a version counter of its own, unlike other views, so that a change is noticed.
    """
    start = offset // like.element_size()
    return flat.view(like.dtype).as_strided(like.shape, like.stride(), start).data


def count_owners(tensor: torch.Tensor) -> int | None:
    """How many hold the tensor's memory, this question included; None where torch cannot say."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(tensor.untyped_storage()._cdata))


def is_copied_as_bytes(tensor: torch.Tensor) -> bool:
    """Whether a copy of the tensor's bytes is a copy of the tensor."""
    return (
        tensor.device.type == CPU.type
        and not moves_by_itself(tensor)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not is_lazy(tensor)
        and tensor.numel() > 0
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_inference()  # no version tells whether it is stale
        and is_dense(tensor)
    )


def _owner(tensor: torch.Tensor) -> int:
    """Whose memory it is: everything between two tensors of one owner may be read."""
    block = block_of(tensor)
    return (tensor.untyped_storage() if block is None else block).data_ptr()


def align(nbytes: int) -> int:
    """Round up to `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
