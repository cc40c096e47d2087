"""The chain of a model: its blocks that run one after another, between which it may be cut."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from anydevice.distributed.tracing import BlockCall, bare_copy, trace
from anydevice.errors import ModelError, OptionError
from anydevice.hooks.forward import has_own_forward
from anydevice.sizes import tensor_bytes
from anydevice.text import list_some

__all__ = ["Chain", "find_chain", "read_example"]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Where a model may be cut, and which of its other modules which stage needs.

    Attributes:
        container: the name of the list of blocks.
        blocks: their full names, in the order in which they run.
        slot: the argument of a block, by position or keyword, that takes the hidden states.
        before: other modules with weights that run before the first block.
        after: those that run after the last one.
        unseen: those that did not run on the example.
        bare: the model on meta.
        keeps_shape: whether all blocks take and return hidden states of one shape and dtype.
    """

    container: str
    blocks: tuple[str, ...]
    slot: int | str
    before: frozenset[str]
    after: frozenset[str]
    unseen: frozenset[str]
    bare: nn.Module
    keeps_shape: bool


def find_chain(model: nn.Module, example: Any) -> Chain:
    """Find the blocks of a model by running it once without values.

    Args:
        model: on any device, meta too; not changed.
        example: see `read_example`.

    Raises:
        ModelError: there is no list of blocks, or they do not run one after another, or a block
            needs more of the others than their hidden states.
    """
    bare = bare_copy(model).eval()
    container = _container(bare)
    blocks = {
        f"{container}.{name}".lstrip("."): child
        for name, child in bare.get_submodule(container).named_children()
    }
    outside = dict(_outside(bare, container))
    args, kwargs = read_example(model, example)
    seen = trace(bare, blocks, outside, args, kwargs)
    _check_order(model, list(blocks), [call.block for call in seen.calls])
    slot = _slot(model, seen.calls)
    before, after = _sides(model, seen.events, seen.calls)
    hidden = {call.shapes[slot] for call in seen.calls}
    return Chain(
        container,
        tuple(blocks),
        slot,
        before,
        after,
        frozenset(outside) - before - after,
        bare,
        len(hidden | {call.output for call in seen.calls}) == 1,
    )


def read_example(model: nn.Module, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments for one forward.

    Args:
        model: that they are for.
        example: a tensor, a tuple of arguments, or a mapping of keyword arguments; None makes some
            for a transformers model.

    Raises:
        OptionError: there is none, and none can be made.
    """
    if example is None:
        if not hasattr(model, "main_input_name"):
            raise OptionError(
                f"{type(model).__name__}: pass example_inputs, such as a tensor of the shape that "
                "its forward takes: the model is run once without its weights, to see in what "
                "order its modules are called"
            )
        from anydevice.pretrained.inputs import synthetic_batch

        return (), synthetic_batch(model)
    if isinstance(example, torch.Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if isinstance(example, (tuple, list)):
        return tuple(example), {}
    raise OptionError(
        f"example_inputs is a {type(example).__name__}: give a tensor, a tuple of arguments, or a "
        "dict of keyword arguments"
    )


def _container(bare: nn.Module) -> str:
    """The list of modules that holds the most bytes, and is in no other one.

    Raises:
        ModelError: there is none with two modules.
    """
    best, most = None, 0
    stack = [("", bare)]
    while stack:
        name, module = stack.pop()
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(children) > 1:
            size = sum(
                tensor_bytes(parameter, parameter.dtype) for parameter in module.parameters()
            )
            if size > most:
                best, most = name, size
            continue
        stack += [(f"{name}.{n}".lstrip("."), child) for n, child in module.named_children()]
    if best is None:
        raise ModelError(
            f"{type(bare).__name__} cannot be cut into stages: it has no ModuleList or Sequential "
            "with two or more modules that have weights"
        )
    return best


def _outside(bare: nn.Module, container: str) -> Iterator[tuple[str, nn.Module]]:
    """The outermost callable modules with weights that are neither the container nor around it."""
    stack = [("", bare)]
    while stack:
        name, module = stack.pop()
        is_around = name == "" or container == name or container.startswith(f"{name}.")
        if name == container:
            continue
        if is_around or not has_own_forward(module):
            stack += [(f"{name}.{n}".lstrip("."), child) for n, child in module.named_children()]
        elif any(True for _ in module.parameters()):
            yield name, module


def _check_order(model: nn.Module, blocks: list[str], called: list[str]) -> None:
    if called == blocks:
        return
    kind = type(model).__name__
    missing = [name for name in blocks if name not in called]
    twice = [name for name in blocks if called.count(name) > 1]
    why = (
        f"{list_some(missing)} did not run on the example inputs"
        if missing
        else f"{list_some(twice)} runs more than once in one forward"
        if twice
        else f"its blocks run in the order {list_some(called)}"
    )
    raise ModelError(
        f"{kind} cannot be cut into stages: {why}. Each block must run once, in the order of the "
        "list that holds them"
    )


def _slot(model: nn.Module, calls: list[BlockCall]) -> int | str:
    """The argument that takes the hidden states, the same for all blocks.

    Raises:
        ModelError: the blocks need more of each other, or of other modules.
    """
    kind = type(model).__name__
    for before, call in itertools.pairwise(calls):
        if call.slot is None:
            raise ModelError(
                f"{kind} cannot be cut into stages: {call.block} does not take what {before.block} "
                "returns, but something that is computed from it in between"
            )
    slots = {call.slot for call in calls[1:]}
    slot = calls[1].slot
    assert slot is not None
    if len(slots) > 1 or slot not in calls[0].shapes:
        raise ModelError(
            f"{kind} cannot be cut into stages: its blocks take their hidden states in different "
            f"arguments: {', '.join(map(str, slots))}"
        )
    for call in calls:
        more = [key for key in call.from_weights if key != slot]
        if more:
            raise ModelError(
                f"{kind} cannot be cut into stages: {call.block} takes argument {more[0]!r} "
                "besides the hidden states, which weights outside that block are needed to "
                "compute; only hidden states are sent between stages. Use "
                "anydevice.from_pretrained or load_tensor_parallel"
            )
    return slot


def _sides(
    model: nn.Module, events: list[str], calls: list[BlockCall]
) -> tuple[frozenset[str], frozenset[str]]:
    """The other modules that run before the first block, and after the last one."""
    first, last = events.index(calls[0].block), events.index(calls[-1].block)
    between = set(events[first : last + 1]) - {call.block for call in calls}
    if between:
        raise ModelError(
            f"{type(model).__name__} cannot be cut into stages: {list_some(sorted(between))} runs "
            "between its blocks"
        )
    return frozenset(events[:first]), frozenset(events[last + 1 :])
