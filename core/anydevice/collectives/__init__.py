"""Collectives on nested data, checked: what ranks do differently is an error that says where.

Each call first compares what the ranks are about to do (see `anydevice.processes.meeting`), then
makes one collective for all tensors of a device. Tensors of the host travel in the same group.
"""

from __future__ import annotations

from anydevice.collectives.broadcasting import broadcast, broadcast_object_list
from anydevice.collectives.gathering import gather, gather_object
from anydevice.collectives.padding import (
    CannotPadNestedTensorWarning,
    pad_across_processes,
    pad_input_tensors,
)
from anydevice.collectives.reducing import reduce
from anydevice.collectives.slicing import find_batch_size, is_namedtuple, slice_tensors

__all__ = [
    "CannotPadNestedTensorWarning",
    "broadcast",
    "broadcast_object_list",
    "find_batch_size",
    "gather",
    "gather_object",
    "is_namedtuple",
    "pad_across_processes",
    "pad_input_tensors",
    "reduce",
    "slice_tensors",
]
