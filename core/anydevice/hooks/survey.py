"""What is known of each module of a placed model: where it runs, and what is stored elsewhere."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from anydevice.devices import Device
from anydevice.hooks.code_search import needs_all_weights
from anydevice.hooks.execution_plan import ExecutionPlan
from anydevice.hooks.forward import has_own_forward
from anydevice.sizes import tensor_bytes
from anydevice.weights import Slot, iter_modules, iter_slots

__all__ = ["Node", "Survey", "descend", "uncalled"]


@dataclasses.dataclass
class Node:
    """A module and what is known of it."""

    name: str
    module: nn.Module
    place: Device | None  # where it runs
    own: list[tuple[str, Slot]]  # its own weights
    away: list[tuple[str, Slot]]  # those of them that are stored elsewhere
    places: set[Device | None]  # where it and its parts run
    size: int  # bytes that are stored elsewhere, of it and its parts
    block_below: bool
    shared_below: bool
    children: list[Node]

    @property
    def callable(self) -> bool:
        """Whether the module has a forward of its own."""
        return has_own_forward(self.module)


class Survey:
    """Looks at the modules of a model, or of a part of one, once.

    Args:
        plan: how the model is to run.
        module: the model or part.
        usual: see below.

    Attributes:
        blocks: names of the blocks.
        usual: bytes of the largest block or single module: what a group may take anyway.
    """

    def __init__(self, plan: ExecutionPlan, module: nn.Module, usual: int) -> None:
        self.plan, self.usual = plan, usual
        self.blocks, self.preload = frozenset(plan.blocks), frozenset(plan.preload)
        owners = [m for _, m in iter_modules(module) if m._modules]
        uses = Counter(id(c) for m in owners for c in m._modules.values() if c is not None)
        self.shared = {child for child, count in uses.items() if count > 1}
        self.nodes: dict[int, Node] = {}

    def look_at(self, name: str, module: nn.Module) -> Node:
        """Learn of a module and its parts.

        Args:
            name: the module's full name.
            module: the module.
        """
        return self._look(name, module, None)

    def _look(self, name: str, module: nn.Module, forced: Device | None) -> Node:
        """Learn of a module and its parts. ``forced`` is where a preloaded ancestor runs."""
        known = self.nodes.get(id(module))
        if known is not None:
            return known
        place = forced or self.plan.execution(name)
        if forced is None and self.is_preloaded(module):
            forced = place = place or self.plan.main
        target = (place or self.plan.main).torch
        own = list(iter_slots(module, name, recurse=False))
        away = [(n, s) for n, s in own if _is_away(s, target)]
        node = Node(name, module, place, own, away, {place}, 0, False, False, [])
        self.nodes[id(module)] = node
        dot = f"{name}." if name else ""
        for child_name, child in module._modules.items():
            if child is None:
                continue
            below = self._look(dot + child_name, child, forced)
            node.children.append(below)
            node.places |= below.places
            node.size += below.size
            node.block_below |= below.block_below or below.name in self.blocks
            node.shared_below |= below.shared_below or id(child) in self.shared
        seen = {id(s.get()): s for _, s in away}
        mine = sum(tensor_bytes(t) for s in seen.values() if (t := s.get()) is not None)
        node.size += mine
        self.usual = max(self.usual, mine, node.size if name in self.blocks else 0)
        return node

    def is_preloaded(self, module: nn.Module) -> bool:
        """Whether all weights of a module must be where it runs, however large they are."""
        return type(module).__name__ in self.preload or needs_all_weights(module)


def _is_away(slot: Slot, target: torch.device) -> bool:
    tensor = slot.get()
    return tensor is not None and tensor.device != target


def uncalled(node: Node) -> Iterator[Node]:
    """Parts that are never called themselves, such as a ParameterList: their parent uses them."""
    for child in node.children:
        if not child.callable:
            yield child
            yield from uncalled(child)


def descend(node: Node) -> Iterator[Node]:
    """A module and all its parts."""
    yield node
    for child in node.children:
        yield from descend(child)
