"""Weights of offloaded modules while backward runs code of theirs.

Most of backward needs no module: autograd has saved what it needs. Two kinds of code look at the
module again: `torch.utils.checkpoint` runs a function a second time, and the ``backward`` of a
`torch.autograd.Function` may use a weight by the module that owns it. By then the forward is over,
and the weights are stored where they belong. For modules that name such code in their forward, the
weights are loaded again for that part of backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from anydevice.devices import Device, parse_device
from anydevice.hooks.cross_device import Alignment
from anydevice.hooks.execution import execute
from anydevice.nested import iter_tensors
from anydevice.tensors import move_tensor
from anydevice.transfer import OffloadGroup

__all__ = ["prepare_backward"]

#: Most nodes of a graph that are looked at after one forward.
_MOST_NODES = 20_000


def prepare_backward(
    group: OffloadGroup | None,
    device: Device | None,
    alignment: Alignment,
    inputs: Any,
    output: Any,
) -> None:
    """Have backward through a forward's graph load the weights where it needs them.

    Args:
        group: the weights; None where no weight has to be loaded.
        device: where the module runs.
        alignment: see `Alignment`.
        inputs: arguments of the forward, as it got them.
        output: what it returned.
    """
    given = [t for t in iter_tensors(inputs) if t.requires_grad]
    made = [t for t in iter_tensors(output) if t.grad_fn is not None]
    for node in _own_functions(made, given):
        node._forward_cls = _Onloaded(node._forward_cls, group, device, alignment)
    if group is not None and group.is_entered:
        span = _Span(group)
        for tensor in made:
            _on_gradient(tensor, span.begin)
        span.expect(t for t in given if t.grad_fn is not None)


def _own_functions(made: list[torch.Tensor], given: list[torch.Tensor]) -> list[Any]:
    """Nodes of `torch.autograd.Function` between some tensors and those they were made of."""
    seen = {t.grad_fn for t in given}
    todo: list[Any] = [t.grad_fn for t in made if t.grad_fn not in seen]
    found = []
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        kind = getattr(node, "_forward_cls", None)
        if kind is not None and not isinstance(kind, _Onloaded):
            found.append(node)
        todo += [following for following, _ in node.next_functions]
    return found


class _Onloaded:
    """Stands for a `torch.autograd.Function` in a node: its backward has the weights loaded."""

    vjp = staticmethod(torch.autograd.Function.vjp)

    def __init__(
        self, function: Any, group: OffloadGroup | None, device: Device | None, alignment: Alignment
    ) -> None:
        self._function, self._group = function, group
        self._device, self._alignment = device, alignment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def backward(self, ctx: Any, *gradients: Any) -> Any:
        """Run the function's own backward."""
        function, plain = self._function, torch.autograd.Function
        run = function.backward if function.vjp is plain.vjp else function.vjp
        with self._group.call() if self._group is not None else contextlib.nullcontext():
            result = execute(self._device, None, self._alignment, run, (ctx, *gradients), {})
        return _each_where_expected(ctx, result) if self._alignment is Alignment.ON else result


def _each_where_expected(ctx: Any, result: Any) -> Any:
    """Move gradients to the devices of the tensors that they are for."""
    gradients = list(result) if isinstance(result, tuple) else [result]
    following = [(node, index) for node, index in ctx.next_functions if node is not None]
    wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
    for i, (node, index) in zip(wanted, following, strict=False):
        if isinstance(gradients[i], torch.Tensor):
            device = parse_device(node._input_metadata[index].device)
            gradients[i] = move_tensor(gradients[i], device)
    return tuple(gradients) if isinstance(result, tuple) else gradients[0]


def _on_gradient(tensor: torch.Tensor, function: Callable[[torch.Tensor], None]) -> None:
    register: Any = tensor.register_hook
    register(function)


class _Span:
    """Has the weights in place from the first gradient of an output to the last of an input."""

    def __init__(self, group: OffloadGroup) -> None:
        self._group = group
        self._call: Any = None
        self._count = self._left = 0

    def expect(self, given: Iterable[torch.Tensor]) -> None:
        """End when all of these have their gradients, or when backward ends."""
        for tensor in given:
            self._count += 1
            _on_gradient(tensor, self._one_done)

    def begin(self, _gradient: torch.Tensor) -> None:
        """An output has its gradient."""
        if self._call is None:
            self._left = self._count
            self._call = self._group.call()
            engine: Any = torch.autograd.Variable._execution_engine
            engine.queue_callback(self.end)
            self._call.enter()

    def _one_done(self, _gradient: torch.Tensor) -> None:
        self._left -= 1
        if self._left == 0:
            self.end()

    def end(self) -> None:
        """Let the weights go."""
        call, self._call = self._call, None
        if call is not None:
            call.leave()

    def __del__(self) -> None:
        self.end()  # where backward raised
