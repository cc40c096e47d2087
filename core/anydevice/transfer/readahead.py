"""Reading ahead from the disk, for weights that are views of files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from anydevice.checkpoint.mapped import backing_of, map_file
from anydevice.devices import CPU
from anydevice.errors import CheckpointError

try:
    import resource
except ImportError:  # no such counts on this system
    resource = None  # type: ignore[assignment]

__all__ = ["is_worth_reading_ahead", "page_faults", "read_ahead"]

#: Below, the system's own reading ahead is as good.
_SMALLEST: Final = 1 << 20


def page_faults() -> int:
    """How often this process has waited for the disk to read a page of memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt if resource is not None else 0


def is_worth_reading_ahead(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether much of the tensors' data is in mapped files."""
    mapped = (t.nbytes for t in tensors if t.device.type == CPU.type and backing_of(t) is not None)
    return sum(mapped) >= _SMALLEST


def read_ahead(tensors: Iterable[torch.Tensor]) -> None:
    """Tell the system that tensors which are views of files will be needed soon."""
    for tensor in tensors:
        place = backing_of(tensor)
        if place is None:
            continue
        try:
            map_file(place.path).will_need(place.offset, place.nbytes)
        except (CheckpointError, OSError):
            return  # only advice: the use of the weights raises what is wrong
