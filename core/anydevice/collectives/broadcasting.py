"""Giving every rank what one of them has."""

from __future__ import annotations

import pickle
from typing import Any, Final

import torch
import torch.distributed as dist

from anydevice.collectives.describing import describe, tensors_of
from anydevice.collectives.packing import by_device_type, pack, unpack
from anydevice.errors import OptionError
from anydevice.processes import PartialState

__all__ = ["broadcast", "broadcast_object_list"]

_SMALL: Final = 4096


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Overwrite each tensor in nested data by one rank's, and return the data.

    Args:
        tensor: a tensor, or nested data of them, of the same structure, shapes and dtypes on each
            rank.
        from_process: whose values all get.

    Raises:
        CollectiveMismatchError: structures, shapes, dtypes or ``from_process`` differ.
        MissingRankError: a rank does not make the call.
        OptionError: there is no such rank.
        TypeError: there is something else than tensors.

    Example:
        >>> import torch
        >>> from anydevice.utils import broadcast
        >>> broadcast({"x": torch.ones(2)})  # one process: what it has
        {'x': tensor([1., 1.])}
    """
    state = PartialState()
    tensors = tensors_of(tensor, "broadcast")
    _need_rank(state, from_process)
    if state.num_processes == 1:
        return tensor
    state.meet("broadcast", f"{describe(tensor)} from rank {from_process}")
    with state.collective("broadcast"), torch.no_grad():
        for positions in by_device_type(tensors):
            mine = [tensors[position] for position in positions]
            whole = pack(mine)
            if whole.numel():
                dist.broadcast(whole, src=from_process)
            if state.process_index != from_process:
                for old, new in zip(mine, unpack(whole, mine), strict=True):
                    if old.data_ptr() != new.data_ptr():  # else it was received in place
                        old.copy_(new)
    return tensor


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite a list of picklable objects by one rank's, and return it.

    Args:
        object_list: as long on each rank.
        from_process: whose objects all get.

    Raises:
        CollectiveMismatchError: the lengths or ``from_process`` differ.
        MissingRankError: a rank does not make the call.
        OptionError: there is no such rank.

    Example:
        >>> from anydevice.utils import broadcast_object_list
        >>> broadcast_object_list(["name", 1])  # one process: what it has
        ['name', 1]
    """
    state = PartialState()
    _need_rank(state, from_process)
    if state.num_processes == 1:
        return object_list
    is_source = state.process_index == from_process
    data = pickle.dumps(list(object_list)) if is_source else b""
    small = len(data) <= _SMALL
    told = state.meet(
        "broadcast_object_list",
        f"{len(object_list)} objects from rank {from_process}",
        b"" if not is_source else b"=" + data if small else b"#%d" % len(data),
    )[from_process]
    if is_source:
        received = data
    elif told[:1] == b"=":
        received = told[1:]
    if told[:1] == b"#":
        buffer = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if is_source
            else torch.empty(int(told[1:]), dtype=torch.uint8)
        )
        with state.collective("broadcast_object_list"):
            dist.broadcast(buffer, src=from_process)
        received = bytes(buffer.numpy())
    if not is_source:
        object_list[:] = pickle.loads(received)
    return object_list


def _need_rank(state: PartialState, rank: int) -> None:
    if not 0 <= rank < state.num_processes:
        raise OptionError(f"from_process={rank}: give a rank from 0 to {state.num_processes - 1}")
