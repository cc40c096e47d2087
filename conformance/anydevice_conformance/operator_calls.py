"""Calls an operator in one of the ways in which it can be called."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from anydevice_conformance.layouts import LAYOUTS

__all__ = ["called", "in_double", "placed"]


def called(description: Any, sample: Any, way: str, layout: str, only: int, given: Any) -> Any:
    """What an operator gives, and what its arguments and their neighbours in memory are then.

    Args:
        description: of the operator.
        sample: says how a gradient is taken of its results.
        way: one of plain, in place, into out, gradient.
        layout: of what is written into.
        only: the number of the argument that a gradient is taken for, of all that have one;
            negative for all of them.
        given: the arguments, and options.
    """
    arguments, options = given
    if way == "gradient":
        return _gradients(description, sample, only, arguments, options)
    if way == "in place":
        result = description.inplace_variant(*arguments, **options)
    else:
        result = description(*arguments, **options)
    if way == "into out":
        out = pytree.tree_map_only(torch.Tensor, lambda one: _filled(one, layout), result)
        description(*arguments, **options, out=out)
        result = out, pytree.tree_map_only(torch.Tensor, _whole, out)
    return result, pytree.tree_map_only(torch.Tensor, _whole, arguments)


def placed(tensor: torch.Tensor, device: torch.device, layout: str, offset: int) -> torch.Tensor:
    """A copy on a device, of the layout, so many elements within its storage."""
    made = LAYOUTS[layout](tuple(tensor.shape))
    if made is None or (layout == "contiguous" and not offset):
        return tensor.clone(memory_format=torch.contiguous_format).to(device)
    count, view = made
    flat = tensor.new_zeros(offset + count)
    view(flat[offset:]).copy_(tensor)
    there: torch.Tensor = view(flat.to(device)[offset:])
    return there


def _filled(result: torch.Tensor, layout: str) -> torch.Tensor:
    """A tensor to write a result into, that lies in memory as nobody's result does by itself."""
    count, view = LAYOUTS[layout](tuple(result.shape)) or LAYOUTS["stepped"](tuple(result.shape))  # type: ignore[misc]
    flat = torch.full((count + 3,), 1, dtype=result.dtype, device=result.device)
    into: torch.Tensor = view(flat[3:])
    return into


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of the memory that it is a view of."""
    base = tensor._base
    return tensor if base is None else base


def _gradients(
    description: Any, sample: Any, only: int, arguments: list[Any], options: dict[str, Any]
) -> list[Any]:
    """Of a weighted sum of the results, for the floating arguments or one of them."""
    leaves: list[torch.Tensor] = []

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.detach()
        if found.is_floating_point():
            leaves.append(found)
        return found

    arguments, options = pytree.tree_map_only(torch.Tensor, leaf, (arguments, options))
    if only >= 0:
        leaves[:] = [leaves[only % len(leaves)]]
    for one in leaves:
        one.requires_grad_()
    result = sample.output_process_fn_grad(description(*arguments, **options))
    outputs = [r for r in pytree.tree_leaves(result) if isinstance(r, torch.Tensor)]
    outputs = [r for r in outputs if r.requires_grad and not r.is_complex()]
    weights = [_weights(r).to(r.dtype).to(r.device) for r in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def _weights(result: torch.Tensor) -> torch.Tensor:
    values = torch.linspace(-1.0, 1.5, max(1, result.numel()), dtype=torch.float64)
    return values[: result.numel()].reshape(result.shape)


def in_double(given: Any) -> Any:
    """The arguments with twice the digits; None where they have none."""
    tensors = [a for a in pytree.tree_leaves(given) if isinstance(a, torch.Tensor)]
    if not any(t.is_floating_point() or t.is_complex() for t in tensors):
        return None

    def doubled(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_complex():
            return tensor.to(torch.complex128)
        return tensor.double() if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(torch.Tensor, doubled, given)
