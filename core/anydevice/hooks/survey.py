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
    place: Device | None = None  # where it runs
    own: list[tuple[str, Slot]] = dataclasses.field(default_factory=list)  # its own weights
    #: Those of them that are stored elsewhere.
    away: list[tuple[str, Slot]] = dataclasses.field(default_factory=list)
    places: set[Device | None] = dataclasses.field(default_factory=set)  # of it and its parts
    size: int = 0  # bytes that are stored elsewhere, of it and its parts
    block_below: bool = False
    shared_below: bool = False
    children: list[Node] = dataclasses.field(default_factory=list)

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
        """Learn of a module, by its full name, and its parts."""
        first = self.nodes[id(module)] = Node(name, module)
        stack: list[tuple[Node, Device | None, bool]] = [(first, None, False)]
        while stack:
            node, forced, has_parts = stack.pop()
            if has_parts:
                self._sum_up(node)
                continue
            forced = self._look(node, forced)
            stack.append((node, forced, True))
            dot = f"{node.name}." if node.name else ""
            new = []
            for child_name, child in node.module._modules.items():
                if child is None:
                    continue
                if id(child) not in self.nodes:
                    self.nodes[id(child)] = Node(dot + child_name, child)
                    new.append(self.nodes[id(child)])
                node.children.append(self.nodes[id(child)])
            stack += [(below, forced, False) for below in reversed(new)]
        return first

    def _look(self, node: Node, forced: Device | None) -> Device | None:
        """Learn of a module by itself, and return where its parts are forced to run.

        ``forced`` is where a preloaded ancestor runs.
        """
        place = forced or self.plan.execution(node.name)
        if forced is None and self.is_preloaded(node.module):
            forced = place = place or self.plan.main
        target = (place or self.plan.main).torch
        node.place, node.places = place, {place}
        node.own = list(iter_slots(node.module, node.name, recurse=False))
        node.away = [(n, s) for n, s in node.own if _is_away(s, target)]
        return forced

    def _sum_up(self, node: Node) -> None:
        """Add what is known of its parts."""
        for below in node.children:
            node.places |= below.places
            node.size += below.size
            node.block_below |= below.block_below or below.name in self.blocks
            node.shared_below |= below.shared_below or id(below.module) in self.shared
        seen = {id(s.get()): s for _, s in node.away}
        mine = sum(tensor_bytes(t) for s in seen.values() if (t := s.get()) is not None)
        node.size += mine
        self.usual = max(self.usual, mine, node.size if node.name in self.blocks else 0)

    def is_preloaded(self, module: nn.Module) -> bool:
        """Whether all weights of a module must be where it runs, however large they are."""
        return type(module).__name__ in self.preload or needs_all_weights(module)


def _is_away(slot: Slot, target: torch.device) -> bool:
    tensor = slot.get()
    return tensor is not None and tensor.device != target


def uncalled(node: Node) -> Iterator[Node]:
    """Parts that are never called themselves, such as a ParameterList: their parent uses them."""
    stack = node.children[::-1]
    while stack:
        child = stack.pop()
        if not child.callable:
            yield child
            stack += reversed(child.children)


def descend(node: Node) -> Iterator[Node]:
    """A module and all its parts."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack += reversed(node.children)
