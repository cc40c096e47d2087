"""Collecting what all processes computed of a data set: each sample once, whatever was repeated."""

from __future__ import annotations

import json
from typing import Any

import torch

from anydevice.collectives import gather
from anydevice.collectives.describing import describe
from anydevice.collectives.gathering import exchange_objects
from anydevice.collectives.padding import pad_to
from anydevice.data import PreparedLoader, Round, current_iteration
from anydevice.errors import OptionError
from anydevice.nested import iter_tensors, map_tensors
from anydevice.processes import PartialState

__all__ = ["gather_for_metrics"]


def gather_for_metrics(state: PartialState, data: Any, use_gather_object: bool = False) -> Any:
    """Collect ``data`` of a batch from all processes, without samples that were repeated.

    Args:
        state: this process.
        data: a tensor or nested data of them, whose first dimension is the batch's (or a multiple
            of it); or any objects.
        use_gather_object: collect objects by pickling them; done for data without tensors anyway.

    Returns:
        As `gather`, or a list of objects; in order of rank.

    Raises:
        OptionError: a tensor's first dimension is no multiple of the batch's, so that the rows of
            repeated samples cannot be told.
    """
    if state.num_processes == 1:
        return data
    iteration = current_iteration()
    loader: PreparedLoader | None = iteration.loader if iteration is not None else None
    known = iteration.round if iteration is not None else None
    # Processes that work on one batch together have the same samples: one of them is asked.
    same = state.num_processes // loader.num_processes if loader is not None else 1
    if use_gather_object or next(iter(iter_tensors(data)), None) is None:
        return _objects(state, data, known, same)
    if loader is not None and not loader.even_batches:
        return _uneven(state, data, same)
    if known is not None and len(set(known.sizes)) > 1:
        return _uneven(state, data, same, known)
    whole = gather(data)
    if known is None and same == 1:
        return whole
    return _take(whole, state.num_processes, same, known)


def _take(whole: Any, count: int, same: int, known: Round | None) -> Any:
    """The real rows of what was gathered from equally large batches."""

    def real(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.chunk(count) if len(tensor) else (tensor,)
        kept = []
        for index, part in enumerate(parts[::same]):
            if known is None:
                kept.append(part)
            else:
                kept.append(part[: _rows(len(part), known.sizes[index], known.real[index])])
        return torch.cat(kept)

    return map_tensors(real, whole)


def _rows(rows: int, size: int, real: int) -> int:
    """How many of ``rows`` belong to the first ``real`` of ``size`` samples."""
    if rows == 1 and size > 1:  # one number for the whole batch
        return 1 if real else 0
    if not size or rows % size:
        raise OptionError(
            f"gather_for_metrics: a tensor of {rows} rows was given for a batch of {size} samples, "
            f"of which {size - real} are repeated ones: which rows are theirs cannot be told. Give "
            "one row a sample, or use gather, or DataLoaderConfiguration(even_batches=False)"
        )
    return rows // size * real


def _uneven(state: PartialState, data: Any, same: int, known: Round | None = None) -> Any:
    """Rows of processes that have differently many."""
    count = state.num_processes
    mine = [len(t) if t.dim() else 1 for t in iter_tensors(data)]
    described = describe(data, shapes=False)
    told = state.meet("gather_for_metrics", described, json.dumps(mine).encode())
    order = list(zip(*map(json.loads, told), strict=True))
    longest = iter([max(lengths) for lengths in order])
    padded = gather(map_tensors(lambda t: pad_to(t, next(longest)), data))
    rows = iter(order)

    def real(tensor: torch.Tensor) -> torch.Tensor:
        own = next(rows)
        parts = tensor.chunk(count) if len(tensor) else (tensor,) * count
        kept = []
        for index, part in enumerate(parts[::same]):
            length = own[index * same]
            if known is not None:
                length = _rows(length, known.sizes[index], known.real[index])
            kept.append(part[:length])
        return torch.cat(kept)

    return map_tensors(real, padded)


def _objects(state: PartialState, data: Any, known: Round | None, same: int) -> list[Any]:
    is_list = isinstance(data, (list, tuple))
    what = "list" if is_list else "object"
    each = exchange_objects(state, "gather_for_metrics", data, what)[::same]
    if not is_list:
        return [one for i, one in enumerate(each) if known is None or known.real[i]]
    if known is not None:
        each = [
            items[: _rows(len(items), known.sizes[i], known.real[i])]
            for i, items in enumerate(each)
        ]
    return [item for items in each for item in items]
