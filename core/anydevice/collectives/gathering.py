"""Collecting what every rank has."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from anydevice.collectives.describing import describe, rebuild, tensors_of
from anydevice.collectives.packing import by_device_type, pack, unpack
from anydevice.devices import CPU
from anydevice.processes import PartialState

__all__ = ["exchange_objects", "gather", "gather_object"]


def gather(tensor: Any) -> Any:
    """Concatenate each tensor in nested data over all ranks, along the first dimension.

    Args:
        tensor: a tensor, or nested lists, tuples, mappings and dataclasses of them, of the same
            structure, shapes and dtypes on each rank.

    Returns:
        The same structure, in order of rank; tensors without dimensions give one dimension. Alone:
        the data itself.

    Raises:
        CollectiveMismatchError: structures, shapes or dtypes differ between ranks.
        MissingRankError: a rank does not make the call.
        TypeError: there is something else than tensors.

    Example:
        >>> import torch
        >>> from anydevice.utils import gather
        >>> gather({"loss": torch.tensor([0.5])})  # alone; two ranks would give shape (2,)
        {'loss': tensor([0.5000])}
    """
    state = PartialState()
    tensors = tensors_of(tensor, "gather")
    if state.num_processes == 1:
        return tensor
    if tensors and all(each.device.type == CPU.type for each in tensors):
        everyone = state.gather_bytes("gather", describe(tensor), pack(tensors))
        return rebuild(tensor, _unpacked(everyone, tensors))
    state.meet("gather", describe(tensor))
    with state.collective("gather"), torch.no_grad():
        return rebuild(tensor, _gather(tensors, state.num_processes))


def _gather(tensors: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    found = list(tensors)
    for positions in by_device_type(tensors):
        mine = [tensors[position] for position in positions]
        whole = pack(mine)
        everyone = whole.new_empty(size, whole.numel())
        if whole.numel():
            dist.all_gather(list(everyone.unbind()), whole)
        for position, joined in zip(positions, _unpacked(everyone, mine), strict=True):
            found[position] = joined
    return found


def _unpacked(everyone: torch.Tensor, mine: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each tensor of all ranks, out of a row of packed bytes for each rank."""
    size = len(everyone)
    if len(mine) == 1:  # its bytes stand side by side already, in each row
        return [everyone.view(mine[0].dtype).reshape(_joined(mine[0], size))]
    pieces = [unpack(part, mine) for part in everyone.unbind()]
    return [
        torch.cat([piece.reshape(_joined(piece, 1)) for piece in same])
        for same in zip(*pieces, strict=True)
    ]


def _joined(tensor: torch.Tensor, size: int) -> tuple[int, ...]:
    shape = tensor.shape or (1,)
    return (shape[0] * size, *shape[1:])


def gather_object(object: Any) -> list[Any]:  # noqa: A002 - the reference's name
    """Collect picklable objects of all ranks.

    Args:
        object: a list, whose items are collected; or anything else.

    Returns:
        The items of all ranks' lists in order of rank; the objects themselves where they are no
        lists. Alone: the object itself.

    Raises:
        CollectiveMismatchError: some ranks bring a list and others do not.
        MissingRankError: a rank does not make the call.

    Example:
        >>> from anydevice.utils import gather_object
        >>> gather_object(["a"])  # alone; two ranks would give ['a', 'b']
        ['a']
    """
    state = PartialState()
    if state.num_processes == 1:
        return object  # type: ignore[no-any-return]
    is_list = isinstance(object, (list, tuple))
    found = exchange_objects(state, "gather_object", object, "list" if is_list else "object")
    return [item for items in found for item in items] if is_list else found


def exchange_objects(
    state: PartialState, call: str, mine: Any, description: Any = None
) -> list[Any]:
    """Every rank's object, in order of rank."""
    return [pickle.loads(data) for data in state.meet(call, description, pickle.dumps(mine))]
