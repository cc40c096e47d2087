"""Calls an operator in each of the ways in which it can be called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.layouts import LAYOUTS

__all__ = ["WAYS", "WRITES", "called", "in_double", "leaves", "mapped", "placed"]

#: How an operator is called; what writes into its arguments comes last.
WAYS: Final = ("plain", "into out", "gradient", "once more", "in place")
#: Of these, those that write into its arguments.
WRITES: Final = ("once more", "in place")
#: Of so many arguments each is tried alone, as where the others are frozen.
_ALONE: Final = 3


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The value with a function of each leaf of its lists, tuples and dicts, in their places."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list | tuple):
        found = [mapped(function, one) for one in value]
        return tuple(found) if isinstance(value, tuple) else found
    if isinstance(value, dict):
        return {key: mapped(function, one) for key, one in value.items()}
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """What stands in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(list(value.values()))
    else:
        yield value


def called(way: str, description: Any, sample: Any, layout: str, given: Any) -> Any:
    """What an operator gives, and what its arguments and their neighbours in memory are then.

    Args:
        way: one of `WAYS`.
        description: of the operator.
        sample: says how a gradient is taken of its results.
        layout: of what is written into, and of the gradient that comes in.
        given: the arguments, and options.
    """
    arguments, options = given
    if way == "gradient":
        return _gradients(description, sample, layout, arguments, options)
    if way == "in place":
        result = description.inplace_variant(*arguments, **options)
    else:
        if way == "once more":
            _change(arguments[0])
        result = description(*arguments, **options)
    if way == "into out":
        out = _tensors(lambda one: _filled(one, layout), result)
        description(*arguments, **options, out=out)
        result = out, _tensors(_whole, out)
    return result, _tensors(_whole, arguments)


def _tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    return mapped(lambda one: function(one) if isinstance(one, torch.Tensor) else one, value)


def _change(argument: Any) -> None:
    """Put an argument's elements in another order, where they are."""
    for tensor in leaves(argument):
        if isinstance(tensor, torch.Tensor) and tensor.dim() and 0 not in tensor.stride():
            tensor.copy_(tensor.cpu().flip(0))


def placed(tensor: torch.Tensor, device: torch.device, layout: str, offset: int) -> torch.Tensor:
    """A copy on a device, of the layout, so many elements within its storage.

    What is expanded has the first of its rows or columns in the place of all.
    """
    if layout in ("rows", "columns"):
        kept = tensor[:1] if layout == "rows" else tensor[..., :1]
        one: torch.Tensor = kept.clone(memory_format=torch.contiguous_format).to(device)
        return one.expand(tensor.shape)
    made = LAYOUTS[layout](tuple(tensor.shape))
    if made is None or (layout == "contiguous" and not offset):
        return tensor.clone(memory_format=torch.contiguous_format).to(device)
    count, view = made
    flat = tensor.new_zeros(offset + count)
    view(flat[offset:]).copy_(tensor)
    there: torch.Tensor = view(flat.to(device)[offset:])
    return there


def _filled(result: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor to write a result into, that lies in memory as nobody's result does by itself.

    It holds small numbers, which are no result's: what is not written shows.
    """
    dense = layout in ("contiguous", "rows", "columns")
    made = None if dense else LAYOUTS[layout](tuple(result.shape))
    count, view = made or LAYOUTS["stepped"](tuple(result.shape))  # type: ignore[misc]
    numbers = torch.arange(count + 3).remainder_(3).to(result.dtype)
    into: torch.Tensor = view(numbers.to(result.device)[3:])
    return into


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that it is a view of."""
    base = tensor._base
    return tensor if base is None else base


def _gradients(
    description: Any, sample: Any, layout: str, arguments: list[Any], options: dict[str, Any]
) -> list[Any]:
    """Of a weighted sum of the results: for all the floating arguments, and for each alone."""
    found: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        detached = tensor.detach()
        if detached.is_floating_point():
            found.append(detached.requires_grad_())
        return detached

    arguments, options = _tensors(leaf, (arguments, options))
    result = sample.output_process_fn_grad(description(*arguments, **options))
    outputs = [r for r in leaves(result) if isinstance(r, torch.Tensor)]
    outputs = [r for r in outputs if r.requires_grad and not r.is_complex()]
    turned = layout == "transposed"
    grads = torch.autograd.grad(
        outputs, found, [_weights(r, turned) for r in outputs], allow_unused=True, retain_graph=True
    )
    summed = [_of_a_sum(r) for r in outputs]
    alone = [[one] for one in found[:_ALONE]]
    found_alone = (
        torch.autograd.grad(outputs, one, summed, allow_unused=True, retain_graph=True)
        for one in alone
    )
    return _tensors(_dense, [grads, *found_alone])  # type: ignore[no-any-return]


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    """With what an embedding leaves out of a sparse one."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _weights(result: torch.Tensor, turned: bool) -> torch.Tensor:
    """A gradient that comes in, other for each element; as of what was transposed, or not."""
    values = torch.linspace(-1.0, 1.5, max(1, result.numel()), dtype=torch.float64)
    values = values[: result.numel()].reshape(result.shape).to(result.dtype)
    if turned and result.dim() > 1:
        return values.mT.contiguous().to(result.device).mT
    return values.to(result.device)


def _of_a_sum(result: torch.Tensor) -> torch.Tensor:
    """The gradient that comes in where all rows, or elements, are summed: it has no strides."""
    width = result.shape[-1] if result.dim() > 1 else 1
    row = torch.linspace(-1.0, 1.5, max(2, width))[1:] if width > 1 else torch.full((1,), 1.5)
    row = torch.cat([row, row[:1]])[:width].to(result.dtype).to(result.device)
    return row.expand(result.shape) if result.dim() else row[0]


def in_double(given: Any) -> Any:
    """The arguments with twice the digits; None where they have none."""
    tensors = [a for a in leaves(given) if isinstance(a, torch.Tensor)]
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return None

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return _tensors(doubled, given)
