"""Dividing a placed model into units of transfer, and hooking its modules accordingly.

Given where each module runs and where its weights rest now, every weight that rests elsewhere gets
into one unit, which is around the forward of the largest module that may be brought as a whole:

- a block that must not be split, where it fits the room kept for visitors;
- else a module without blocks in it that is no larger than the largest block;
- else each child by itself, and the weights that the module owns directly around its own forward.

Modules whose parts run, or rest, on several devices have their own code glued
(`anydevice.hooks.glue`). A module that the model holds twice is always a unit of its own, so no
two units share a slot.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from anydevice.devices import Device
from anydevice.hooks.align import AlignDevicesHook
from anydevice.hooks.base import add_hook_to_module
from anydevice.sizes import tensor_bytes
from anydevice.transfer import Engine, OffloadGroup
from anydevice.weights import Slot, iter_slots

__all__ = ["Layout", "attach_units", "computes_with_parts"]

#: Containers whose children are called by somebody else, or one after the other.
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@dataclasses.dataclass
class Layout:
    """How a model is to run.

    Attributes:
        execution: a module's full name to where it runs; None for one whose parts decide.
        main: where a module runs whose parts decide, as far as its own weights are concerned.
        blocks: full names of modules that are brought as a whole.
        preload: class names of modules that are brought as a whole however large.
        resting: where a weight rests by plan.
        limits: most bytes of one unit, by device; no limit by default.
        skip_keys: see `AlignDevicesHook`.
        io_same_device: whether the outermost module's output follows its input.
        prefix: the outermost module's full name.
        lodgers: buffers of offloaded modules that are where these run.
    """

    execution: Callable[[str], Device | None]
    main: Device
    blocks: Collection[str] = ()
    preload: Collection[str] = ()
    resting: Callable[[str, Slot], Device] | None = None
    limits: Mapping[Device, int] = dataclasses.field(default_factory=dict)
    skip_keys: str | list[str] | None = None
    io_same_device: bool = True
    prefix: str = ""
    lodgers: Sequence[Slot] = ()


@dataclasses.dataclass
class _Node:
    """A module and what is known of it."""

    name: str
    module: nn.Module
    place: Device | None  # where it runs
    own: list[tuple[str, Slot]]  # its own weights
    away: list[tuple[str, Slot]]  # those of them that rest elsewhere
    places: set[Device | None]  # where it and its parts run
    size: int  # bytes that rest elsewhere, of it and its parts
    block_below: bool
    shared_below: bool
    children: list[_Node]

    @property
    def callable(self) -> bool:
        return _has_forward(self.module)


def attach_units(model: nn.Module, layout: Layout, engine: Engine) -> None:
    """Hook the modules of a model whose weights are in their places.

    Args:
        model: the model, or a part of one.
        layout: how it is to run.
        engine: moves the units.
    """
    _Attaching(model, layout, engine).run()


class _Attaching:
    def __init__(self, model: nn.Module, layout: Layout, engine: Engine) -> None:
        self.model, self.layout, self.engine = model, layout, engine
        self.blocks, self.preload = frozenset(layout.blocks), frozenset(layout.preload)
        owners = [m for m in model.modules() if m._modules]
        uses = Counter(id(c) for m in owners for c in m._modules.values() if c is not None)
        self.shared = {module for module, count in uses.items() if count > 1}
        self.nodes: dict[int, _Node] = {}
        self.done: set[int] = set()
        self.glued = False  # whether a module further out is
        self.usual = 0  # bytes of the largest block or single module: what a unit may take anyway

    def run(self) -> None:
        root = self._survey(self.layout.prefix, self.model, None)
        self._visit(root, in_block=False, root=True)

    # ------------------------------------------------------------------ looking

    def _survey(self, name: str, module: nn.Module, forced: Device | None) -> _Node:
        """Learn of a module and its parts. ``forced`` is where a preloaded ancestor runs."""
        known = self.nodes.get(id(module))
        if known is not None:
            return known
        place = forced or self.layout.execution(name)
        if forced is None and type(module).__name__ in self.preload:
            forced = place = place or self.layout.main
        target = (place or self.layout.main).torch
        own = list(iter_slots(module, name, recurse=False))
        away = [(n, s) for n, s in own if _is_away(s, target)]
        node = _Node(name, module, place, own, away, {place}, 0, False, False, [])
        self.nodes[id(module)] = node
        dot = f"{name}." if name else ""
        for child_name, child in module._modules.items():
            if child is None:
                continue
            below = self._survey(dot + child_name, child, forced)
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

    # ------------------------------------------------------------------ attaching

    def _visit(self, node: _Node, in_block: bool, root: bool = False) -> None:
        if id(node.module) in self.done:
            return
        self.done.add(id(node.module))
        in_block = in_block or node.name in self.blocks
        alike = node.places == {node.place} and node.place is not None
        if alike and not node.size:
            self._hook(node, glue=_has_loose_tensors(node.module), root=root)
            self._glue_loose_tensors(node)
        elif alike and node.callable and not node.shared_below and self._is_whole(node, in_block):
            self._bring_whole(node, root)
        else:
            self._bring_parts(node, in_block, root)

    def _is_whole(self, node: _Node, in_block: bool) -> bool:
        """Whether a module with all its parts is one unit."""
        if not node.children or type(node.module).__name__ in self.preload:
            return True
        limit = self.layout.limits.get(node.place) if node.place is not None else None
        if limit is not None and node.size > limit:
            return False
        if in_block or computes_with_parts(node.module):
            return True
        return not node.block_below and node.size <= self.usual

    def _bring_whole(self, node: _Node, root: bool) -> None:
        """One unit around the module; its parts enter the same one when called by themselves."""
        nodes = list(_descend(node))
        slots = [named for part in nodes for named in part.own]
        unit = self._unit(node, slots)
        self._hook(
            node, unit, [s for _, s in slots], glue=_has_loose_tensors(node.module), root=root
        )
        for part in nodes[1:]:
            self.done.add(id(part.module))
            loose = _has_loose_tensors(part.module) or None
            self._hook(part, unit, [s for _, s in part.own], glue=loose)

    def _bring_parts(self, node: _Node, in_block: bool, root: bool) -> None:
        """Its own weights around its own forward, each part by itself."""
        nodes = [node, *_uncalled(node)]
        slots = [named for part in nodes for named in part.own]
        if node.callable or root:
            unit = self._unit(node, slots) if any(part.away for part in nodes) else None
            # Where the place of a module is not known, its inputs come from anywhere.
            comes_to_main = node.place is not None or (root and self.layout.io_same_device)
            alone = comes_to_main and self._is_on_main(node)
            glue = not alone or _has_loose_tensors(node.module)
            self._hook(node, unit, [s for _, s in slots], glue=glue, root=root)
        for child in node.children:
            self._visit(child, in_block)

    def _is_on_main(self, node: _Node) -> bool:
        """Whether all parts run and rest on the main device, named one by one in the map."""
        return not node.size and node.places <= {None, self.layout.main}

    def _unit(self, node: _Node, slots: list[tuple[str, Slot]]) -> OffloadGroup:
        """A unit of all the slots, also those that are in place: they may be assigned to later."""
        device = node.place or self.layout.main
        rest = self.layout.resting
        places = {rest(n, s) for n, s in slots if _is_away(s, device.torch)} if rest else set()
        resting = places.pop() if len(places) == 1 else None
        return self.engine.group(node.name, slots, device, resting=resting)

    def _hook(
        self,
        node: _Node,
        unit: OffloadGroup | None = None,
        slots: list[Slot] | None = None,
        *,
        glue: bool | None,
        root: bool = False,
    ) -> None:
        if not node.callable:
            return
        if glue:
            self.glued = True
        elif not self.glued:  # nothing around it is glued, so there is nothing to stop
            glue = None
        same = root and self.layout.io_same_device
        hook = AlignDevicesHook.planned(
            node.place if not same else node.place or self.layout.main,
            unit=unit,
            slots=slots or (),
            passes=self.engine if root else None,
            glue=glue,
            offload=unit is not None,
            io_same_device=same,
            skip_keys=self.layout.skip_keys,
            lodgers=self.layout.lodgers if root else (),
        )
        add_hook_to_module(node.module, hook, append=True)

    def _glue_loose_tensors(self, node: _Node) -> None:
        for part in list(_descend(node))[1:]:
            self.done.add(id(part.module))
            if _has_loose_tensors(part.module):
                self._hook(part, glue=True)


# ---------------------------------------------------------------------- looking at modules


def _is_away(slot: Slot, target: torch.device) -> bool:
    tensor = slot.get()
    return tensor is not None and tensor.device != target


def _has_forward(module: nn.Module) -> bool:
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


def computes_with_parts(module: nn.Module) -> bool:
    """Whether a module is known to use the weights of its parts without calling them."""
    if isinstance(module, _CONTAINERS):
        return False
    return hasattr(module, "parametrizations") or type(module) is nn.MultiheadAttention


def _uncalled(node: _Node) -> Iterator[_Node]:
    """Parts that are never called themselves, such as a ParameterList: their parent uses them."""
    for child in node.children:
        if not child.callable:
            yield child
            yield from _uncalled(child)


def _descend(node: _Node) -> Iterator[_Node]:
    yield node
    for child in node.children:
        yield from _descend(child)


def _has_loose_tensors(module: nn.Module) -> bool:
    """Whether a module keeps tensors as plain attributes: those are not placed, only glued.

    Old-style ``weight_norm`` and ``spectral_norm`` do, too: they set the weight before each
    forward.
    """
    own = {id(t) for table in (module._parameters, module._buffers) for t in table.values()}
    return any(_is_loose(value, own) for value in module.__dict__.values())


def _is_loose(value: Any, own: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return id(value) not in own
    if type(value) in (list, tuple):
        return any(isinstance(item, torch.Tensor) and id(item) not in own for item in value)
    return False
