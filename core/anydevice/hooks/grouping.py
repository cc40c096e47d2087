"""Dividing a placed model into groups of weights that move together, and hooking its modules.

Given where each module runs and where its weights are stored now, every weight that is stored
elsewhere belongs to one group, which is loaded for the forward of the largest module that may be
loaded as a whole:

- a block that must not be split, where it fits the memory reserved for weights in transit;
- else a module without blocks in it that is no larger than the largest block;
- else each child by itself, and the weights that the module owns directly for its own forward.

A module without a forward (`ModuleList`, `ModuleDict`) is never called, so its children are looked
at one by one. Modules whose parts run, or are stored, on several devices have their own code
aligned (`anydevice.hooks.cross_device`). A module that the model holds twice is always a group of
its own, so no two groups share a slot.

What stands in a module when it runs is what counts: each hook also covers weights that are added
later, and when modules were added or replaced it calls `regroup` for its part of the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from torch import nn

from anydevice.devices import Device
from anydevice.errors import DeviceMapError
from anydevice.hooks.align import AlignDevicesHook
from anydevice.hooks.base import ModelHook
from anydevice.hooks.cross_device import Alignment
from anydevice.hooks.execution_plan import ExecutionPlan
from anydevice.hooks.forward import HOOK, ORIGINAL, OwnForward, PartForward
from anydevice.hooks.registration import add_hook_to_module, remove_matching_hooks
from anydevice.hooks.structure import computes_with_parts, needs_alignment
from anydevice.hooks.survey import Node, Survey, descend, uncalled
from anydevice.placement.scripted import is_scripted, require_undivided
from anydevice.transfer import Engine, OffloadGroup
from anydevice.weights import Slot, iter_modules

__all__ = ["attach_groups"]


def attach_groups(model: nn.Module, plan: ExecutionPlan, engine: Engine) -> None:
    """Hook the modules of a model, or a part of one, whose weights are where they are stored."""
    _Part(plan, engine, plan.prefix, root=True).attach(model)


@dataclasses.dataclass(frozen=True)
class _Part:
    """A part of a model that is divided into groups at once, now or again: the `Regrouping`.

    Attributes:
        plan: how the model is to run.
        engine: moves the groups.
        name: the part's full name.
        in_block: whether it belongs to a block.
        aligned: whether the code of a module further out is aligned.
        usual: bytes of the largest block or single module: what a group may take anyway.
        root: whether it is the whole model.
    """

    plan: ExecutionPlan
    engine: Engine
    name: str
    in_block: bool = False
    aligned: bool = False
    usual: int = 0
    root: bool = False

    def attach(self, module: nn.Module) -> None:
        """Hook the part."""
        _Attaching(self, module).run()

    def regroup(self, module: nn.Module, hook: AlignDevicesHook) -> None:
        """Set the hook up again for the module as it is now, and hook its parts."""
        require_undivided(module, self.plan.execution, self.name)

        def is_ours(other: ModelHook) -> bool:
            return (
                isinstance(other, AlignDevicesHook)
                and isinstance(other._regrouping, _Part)
                and other._regrouping.engine is self.engine
            )

        for _, part in iter_modules(module):
            if part is not module:
                remove_matching_hooks(part, is_ours)
        _Attaching(self, module, hook).run()


class _Attaching:
    """Dividing a part of a model, once.

    Args:
        part: which.
        module: its module.
        hook: the hook that the module has already.
    """

    def __init__(
        self, part: _Part, module: nn.Module, hook: AlignDevicesHook | None = None
    ) -> None:
        self.part, self.module, self.hook = part, module, hook
        self.plan, self.engine = part.plan, part.engine
        self.survey = Survey(part.plan, module, part.usual)
        self.done: set[int] = set()
        self.aligned = part.aligned

    def run(self) -> None:
        node = self.survey.look_at(self.part.name, self.module)
        stack = [(node, self.part.in_block, self.part.root)]
        while stack:
            stack += reversed(self._visit(*stack.pop()))

    # ------------------------------------------------------------------ attaching

    def _visit(self, node: Node, in_block: bool, root: bool) -> list[tuple[Node, bool, bool]]:
        """Hook a module; return those of its parts that are to be visited by themselves."""
        if id(node.module) in self.done:
            return []
        self.done.add(id(node.module))
        in_block = in_block or node.name in self.survey.blocks
        alike = node.places == {node.place} and node.place is not None
        if not node.callable or not alike:
            return self._attach_parts(node, in_block, root)
        if not node.size:
            self._attach_resident(node, in_block, root)
        elif is_scripted(node.module) or (not node.shared_below and self._is_whole(node, in_block)):
            self._attach_whole(node, in_block, root)
        else:
            return self._attach_parts(node, in_block, root)
        return []

    def _is_whole(self, node: Node, in_block: bool) -> bool:
        """Whether a module with all its parts is one group."""
        if not node.children or self.survey.is_preloaded(node.module):
            return True
        limit = self.plan.limits.get(node.place) if node.place is not None else None
        if limit is not None and node.size > limit:
            return False
        if in_block or computes_with_parts(node.module):
            return True
        return not node.block_below and node.size <= self.survey.usual

    def _attach_resident(self, node: Node, in_block: bool, root: bool) -> None:
        """All is where it runs: one hook around the module, for its inputs and for changes."""
        nodes = list(descend(node))
        self._hook(node, nodes, in_block, needs_alignment(node.module), root=root)
        for part in nodes[1:]:
            self.done.add(id(part.module))
            if needs_alignment(part.module):
                self._hook(part, (), in_block, True)

    def _attach_whole(self, node: Node, in_block: bool, root: bool) -> None:
        """One group around the module; its parts enter the same one when called by themselves."""
        nodes = list(descend(node))
        group = self._hook(node, nodes, in_block, needs_alignment(node.module), root=root)
        for part in nodes[1:]:
            self.done.add(id(part.module))
            if is_scripted(node.module):
                continue  # its parts are called in C++
            align = needs_alignment(part.module)
            self._hook(part, list(descend(part)), in_block, align, group=group)
            state = part.module.__dict__
            alone = isinstance(state.get(HOOK), AlignDevicesHook)
            if alone and group is not None and not align and type(state[ORIGINAL]) is OwnForward:
                state["forward"] = PartForward(part.module, group).forward

    def _attach_parts(
        self, node: Node, in_block: bool, root: bool
    ) -> list[tuple[Node, bool, bool]]:
        """Its own weights around its own forward, each part by itself."""
        if node.callable:
            # Where the place of a module is not known, its inputs come from anywhere.
            comes_to_main = node.place is not None or (root and self.plan.io_same_device)
            # All parts run and are stored on the main device, named one by one in the map.
            is_on_main = not node.size and node.places <= {None, self.plan.main}
            align = not (comes_to_main and is_on_main) or needs_alignment(node.module)
            self._hook(node, [node, *uncalled(node)], in_block, align, root=root)
        return [(child, in_block, False) for child in node.children]

    def _group(self, node: Node, nodes: Collection[Node]) -> OffloadGroup:
        """A group of all weights, also those that are in place: they may be assigned to later."""
        device = node.place or self.plan.main
        places = {self._stored(*named) for part in nodes for named in part.away}
        stored = places.pop() if len(places) == 1 else None
        modules = [(part.name, part.module) for part in nodes]
        return self.engine.group(node.name, modules, device, offload_device=stored)

    def _stored(self, name: str, slot: Slot) -> Device | None:
        """Where a weight is stored by plan; None for one that was added since."""
        if self.plan.stored is None:
            return None
        try:
            return self.plan.stored(name, slot)
        except DeviceMapError:
            return None

    def _hook(
        self,
        node: Node,
        nodes: Collection[Node],
        in_block: bool,
        align: bool,
        *,
        root: bool = False,
        group: OffloadGroup | None = None,
    ) -> OffloadGroup | None:
        """Hook a module that covers the own weights of some nodes; return its group.

        Alignment is turned off where a module around it has it on, except for a part of a group.
        """
        if not node.callable:
            return None
        is_part = group is not None
        if group is None and nodes:
            group = self._group(node, nodes)
        outer, self.aligned = self.aligned, self.aligned or align
        alignment = Alignment.ON if align else Alignment.INHERITED
        if not align and self.aligned and not is_part:
            alignment = Alignment.OFF
        same = root and self.plan.io_same_device
        hook = self.hook if node.module is self.module else None
        if hook is None:
            hook = AlignDevicesHook.planned(
                node.place if not same else node.place or self.plan.main,
                _Part(self.plan, self.engine, node.name, in_block, outer, self.survey.usual, root),
                self.engine if root else None,
                same,
                self.plan.skip_keys,
            )
            hook.resident_buffers = frozenset(self.plan.resident_buffers if root else ())
            add_hook_to_module(node.module, hook, append=True)
        hook.alignment = alignment
        hook.offload = hook.offload or any(part.away for part in nodes)
        hook.cover(group, [part.module for part in nodes])
        return group
