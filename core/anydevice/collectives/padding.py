"""Making tensors of different lengths equally long."""

from __future__ import annotations

import json
import warnings
from typing import Any

import torch

from anydevice.collectives.describing import describe
from anydevice.errors import CollectiveMismatchError, OptionError
from anydevice.nested import map_tensors
from anydevice.processes import PartialState

__all__ = ["CannotPadNestedTensorWarning", "pad_across_processes", "pad_input_tensors", "pad_to"]


class CannotPadNestedTensorWarning(UserWarning):
    """A nested tensor was left as it is: it has no one length."""


def pad_across_processes(
    tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> Any:
    """Make each tensor in nested data as long as the longest rank's, so that `gather` can take it.

    Args:
        tensor: a tensor, or nested data of them, of the same structure and dtypes on each rank;
            what is no tensor is left alone.
        dim: the dimension that may differ; tensors with fewer dimensions are left alone.
        pad_index: the value that fills the rest.
        pad_first: put the rest at the beginning.

    Raises:
        CollectiveMismatchError: structures or dtypes differ between ranks.
        MissingRankError: a rank does not make the call.

    Example:
        >>> import torch
        >>> from anydevice.utils import pad_across_processes
        >>> pad_across_processes(torch.tensor([1, 2]))  # alone nothing is longer
        tensor([1, 2])
    """
    state = PartialState()
    if state.num_processes == 1:
        return tensor
    mine = [_length(t, dim) for t in _in_order(tensor)]
    told = state.meet(
        "pad_across_processes",
        f"{describe(tensor, shapes=False)} along {dim}",
        json.dumps(mine).encode(),
    )
    lengths = [json.loads(text) for text in told]
    if len({len(each) for each in lengths}) > 1:
        raise CollectiveMismatchError(f"pad_across_processes: ranks bring {lengths} tensors")
    longest = iter([max(each) for each in zip(*lengths, strict=True)])
    return map_tensors(lambda t: pad_to(t, next(longest), dim, pad_index, pad_first), tensor)


def pad_input_tensors(tensor: Any, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Repeat the last samples until a batch divides evenly among processes.

    Args:
        tensor: a tensor, or nested data of them, with ``batch_size`` samples each.
        batch_size: how many samples there are.
        num_processes: among how many they are divided.
        dim: the dimension of the samples.

    Raises:
        OptionError: the batch is empty.

    Example:
        >>> import torch
        >>> from anydevice.utils import pad_input_tensors
        >>> pad_input_tensors(torch.tensor([1, 2, 3]), 3, 2)
        tensor([1, 2, 3, 3])
    """
    if batch_size < 1:
        raise OptionError("pad_input_tensors: an empty batch has no sample to repeat")
    more = -batch_size % num_processes

    def pad(item: torch.Tensor) -> torch.Tensor:
        if not more or item.ndim <= dim or item.shape[dim] != batch_size:
            return item
        last = item.narrow(dim, batch_size - 1, 1)
        return torch.cat([item, *[last] * more], dim=dim)

    return map_tensors(pad, tensor)


def _in_order(data: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(item: torch.Tensor) -> torch.Tensor:
        found.append(item)
        return item

    map_tensors(note, data)
    return found


def _length(tensor: torch.Tensor, dim: int) -> int:
    if tensor.is_nested:
        warnings.warn(
            "pad_across_processes leaves a nested tensor as it is",
            CannotPadNestedTensorWarning,
            stacklevel=3,
        )
        return 0
    return int(tensor.shape[dim]) if -tensor.ndim <= dim < tensor.ndim else 0


def pad_to(
    tensor: torch.Tensor, longest: int, dim: int = 0, pad_index: int = 0, pad_first: bool = False
) -> torch.Tensor:
    """A tensor that is so long along a dimension; one without that dimension is left alone."""
    if tensor.is_nested or not -tensor.ndim <= dim < tensor.ndim:
        return tensor
    more = longest - tensor.shape[dim]
    if not more:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = more
    rest = tensor.new_full(shape, pad_index)
    return torch.cat([rest, tensor] if pad_first else [tensor, rest], dim=dim)
