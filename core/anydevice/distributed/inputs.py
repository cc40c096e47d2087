"""The inputs of a pipeline: what cannot be given, microbatches, and what ranks compare."""

from __future__ import annotations

import functools
from typing import Any, Final

import torch

from anydevice.collectives import find_batch_size
from anydevice.errors import OptionError
from anydevice.nested import iter_tensors, map_tensors

__all__ = ["PLAIN", "refuse", "shapes", "split"]

#: What is no cache or other object with a state.
PLAIN: Final = (str, bytes, int, float, bool, torch.Tensor, torch.dtype, torch.device, type(None))
_ONLY_LAST: Final = ("output_hidden_states", "output_attentions")


def refuse(kwargs: dict[str, Any]) -> None:
    """Raise for inputs that a pipeline cannot follow.

    Raises:
        OptionError: there is one.
    """
    for name in _ONLY_LAST:
        if kwargs.get(name):
            raise OptionError(
                f"{name}=True: each stage has those of its own blocks only. Leave it out"
            )


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], microbatches: int, takes_cache: bool
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The inputs of each microbatch; of one where a cache is used.

    Args:
        args: of the model's forward.
        kwargs: of it.
        microbatches: how many at most.
        takes_cache: whether the forward makes a cache unless told not to.

    Raises:
        OptionError: the batch cannot be divided.
    """
    has_cache = any(not isinstance(v, (*PLAIN, tuple, list, dict)) for v in kwargs.values())
    if microbatches == 1 or has_cache or kwargs.get("use_cache"):
        return [(args, kwargs)]
    if takes_cache:
        kwargs = {**kwargs, "use_cache": False}
    size = find_batch_size((args, kwargs)) or 1
    count = min(microbatches, size)
    if size % count:
        raise OptionError(
            f"a batch of {size} cannot be divided into microbatches={count}: give a multiple"
        )
    length = size // count
    return [
        map_tensors(
            functools.partial(_slice, whole=size, start=start, length=length), (args, kwargs)
        )
        for start in range(0, size, length)
    ]


def _slice(tensor: torch.Tensor, whole: int, start: int, length: int) -> torch.Tensor:
    """A microbatch's part of an input; all of one that is the same for every sequence."""
    if tensor.dim() and tensor.shape[0] == whole:
        return tensor[start : start + length]
    if tensor.dim() > 1 and tensor.shape[0] != 1 and tensor.shape[1] == whole:
        raise OptionError(
            f"an input of shape {tuple(tensor.shape)} has the batch of {whole} in its second "
            "dimension: load the pipeline with microbatches=1"
        )
    return tensor


def shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """What must be equal on all ranks, as text."""
    described = []
    for name, value in [*enumerate(args), *sorted(kwargs.items())]:
        found = [f"{tuple(t.shape)} {t.dtype}".replace("torch.", "") for t in iter_tensors(value)]
        if found:
            described.append(f"{name}: {', '.join(found)}")
        elif isinstance(value, PLAIN):
            described.append(f"{name}={value!r}")
    return described
