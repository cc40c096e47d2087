"""What the last stage returns, joined from its microbatches and given to every rank."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from anydevice.errors import OptionError
from anydevice.nested import map_tensors

__all__ = ["Failure", "join", "share"]

_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """The place of a tensor that is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class _Own:
    """The place of an object of which each rank has its own, such as a key-value cache."""

    name: str


@dataclasses.dataclass(frozen=True)
class Failure:
    """In place of the outputs: why there are none."""

    reason: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """For an error."""
        return cls(f"{type(error).__name__}: {error}")


def join(outputs: Sequence[Any]) -> Any:
    """The outputs of microbatches as that of the batch.

    Raises:
        OptionError: one has no batch dimension, such as a mean loss.
    """
    if len(outputs) == 1:
        return outputs[0]
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        if not first.dim():
            raise OptionError(
                "an output of the model is a single number, such as a mean loss, which cannot be "
                "joined from microbatches: load the pipeline with microbatches=1"
            )
        return torch.cat(list(outputs))
    if isinstance(first, Mapping):
        return _like(first, {key: join([out[key] for out in outputs]) for key in first})
    if isinstance(first, (tuple, list)):
        return _sequence_like(first, [join(items) for items in zip(*outputs, strict=True)])
    if isinstance(first, _PLAIN):
        return first
    raise OptionError(
        f"an output of the model is a {type(first).__name__}, which cannot be joined from "
        "microbatches: load the pipeline with microbatches=1"
    )


def share(output: Any, own: Mapping[str, Any], source: int, device: torch.device) -> Any:
    """Give the last stage's output to every rank, which must all call it.

    Args:
        output: on the rank ``source``; perhaps a `Failure`.
        own: objects of which each rank has its own, by name.
        source: the rank that has the output.
        device: of this rank.

    Returns:
        The output, with its tensors on ``device``; or a `Failure`, also where it holds an object
        that cannot be sent.
    """
    is_source = dist.get_rank() == source
    if is_source:
        # Hooks return it to where the inputs were, which on another rank is another kind of device.
        output = map_tensors(lambda tensor: tensor.to(device), output)
    tensors: list[torch.Tensor] = []
    plan: list[Any] = [_plan(output, own, tensors) if is_source else None]
    dist.broadcast_object_list(plan, src=source, device=torch.device("cpu"))
    if isinstance(plan[0], Failure):
        return plan[0]
    if is_source:
        for tensor in tensors:
            _send(tensor, source)
        return output
    return _receive(plan[0], own, source, device)


class _CannotSendError(Exception):
    """An object in the output."""


def _plan(output: Any, own: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
    try:
        return _describe(output, own, tensors)
    except _CannotSendError as error:
        return Failure(str(error))


def _describe(output: Any, own: Mapping[str, Any], tensors: list[torch.Tensor]) -> Any:
    """The output with places instead of tensors, which are collected in order."""
    if isinstance(output, torch.Tensor):
        tensors.append(output.contiguous())
        return _Tensor(tuple(output.shape), output.dtype)
    name = next((name for name, value in own.items() if value is output), None)
    if name is not None and not isinstance(output, _PLAIN):
        return _Own(name)
    if isinstance(output, Mapping):
        return _like(output, {k: _describe(v, own, tensors) for k, v in output.items()})
    if isinstance(output, (tuple, list)):
        return _sequence_like(output, [_describe(item, own, tensors) for item in output])
    try:
        pickle.dumps(output)
    except Exception as error:
        raise _CannotSendError(
            f"its output holds a {type(output).__name__}, which cannot be sent: {error}"
        ) from error
    return output


def _receive(plan: Any, own: Mapping[str, Any], source: int, device: torch.device) -> Any:
    if isinstance(plan, _Tensor):
        tensor = torch.empty(plan.shape, dtype=plan.dtype, device=device)
        _send(tensor, source)
        return tensor
    if isinstance(plan, _Own):
        return own.get(plan.name)
    if isinstance(plan, Mapping):
        return _like(plan, {k: _receive(v, own, source, device) for k, v in plan.items()})
    if isinstance(plan, (tuple, list)):
        return _sequence_like(plan, [_receive(item, own, source, device) for item in plan])
    return plan


def _send(tensor: torch.Tensor, source: int) -> None:
    if tensor.numel():
        dist.broadcast(tensor.view(-1).view(torch.uint8), src=source)


def _like(mapping: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    """A mapping of the same class with other values; a class's own constructor may read them."""
    if type(mapping) is dict:
        return values
    new = copy.copy(mapping)
    for key, value in values.items():
        new[key] = value  # type: ignore[index]
    return new


def _sequence_like(sequence: Any, items: list[Any]) -> Any:
    kind = type(sequence)
    return kind(*items) if hasattr(sequence, "_fields") else kind(items)
