"""What is placed: the blocks of a model, in execution order, with their bytes.

A block goes to one device as a whole. It is a module that must not be split, a module without
children, or a parameter or buffer that stands alone in a module that is split.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from anydevice.sizes import DtypeLike, dtype_after_load, tensor_bytes
from anydevice.ties import Ties

__all__ = ["Block", "Inventory", "find_blocks", "take_inventory"]

_LISTS: Final = (nn.ModuleList, nn.Sequential)


@dataclasses.dataclass(slots=True)
class Block:
    """One thing to place.

    Attributes:
        name: full name of the module, parameter or buffer.
        kind: class name of the module, or ``"Parameter"`` or ``"buffer"``.
        parameters: indices into `Inventory.sizes`, each once.
        buffers: the same, of buffers.
        leaf: the most bytes of parameters that one module in it owns itself.
        leaf_buffers: the most bytes of parameters and buffers that one module in it owns itself.
    """

    name: str
    kind: str
    parameters: Sequence[int] = ()
    buffers: Sequence[int] = ()
    leaf: int = 0
    leaf_buffers: int = 0


@dataclasses.dataclass(slots=True)
class Inventory:
    """The blocks of a model and the tensors in them.

    Attributes:
        blocks: in execution order.
        sizes: bytes of each distinct tensor; a tied one is there once.
        dtypes: the dtype of each, as loaded.
    """

    blocks: list[Block]
    sizes: list[int]
    dtypes: list[DtypeLike]


def find_blocks(
    model: nn.Module, no_split_module_classes: Collection[str] | str | None = None
) -> list[str]:
    """Find the modules that must not be split over devices.

    Args:
        model: the model.
        no_split_module_classes: names of their classes. None finds them: classes that the model or
            a submodule declares as ``_no_split_modules``; where there are none of those, the
            children of one class in a `ModuleList` or `Sequential`.

    Returns:
        Their full names in the model's order, none inside another.
    """
    splitter = _Splitter(model, no_split_module_classes)
    names = []
    stack: list[tuple[str, nn.Module, bool]] = [("", model, False)]
    while stack:
        name, module, repeated = stack.pop()
        if splitter.is_whole(module, repeated):
            names.append(name)
        else:
            stack += reversed(list(splitter.children(name, module)))
    return names


def take_inventory(
    model: nn.Module,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    largest: int | None = None,
) -> Inventory:
    """List the blocks of a model. One walk.

    Args:
        model: on any device, meta too.
        no_split_module_classes: see `find_blocks`.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        largest: bytes that a device can give at most. A block found without being named that is
            larger is divided where it has repeated children of its own.
    """
    return _Walk(model, no_split_module_classes, dtype, special_dtypes, largest).run()


class _Splitter:
    """Decides which modules stay whole."""

    def __init__(self, model: nn.Module, named: Collection[str] | str | None) -> None:
        self.model = model
        self.finds = named is None
        self.classes = {named} if isinstance(named, str) else set(named or ())
        #: Modules (by id) in which a declared block stands, so that repetition says nothing there.
        self.declared: set[int] = set()
        if self.finds:
            self._read_declarations(model)

    def _read_declarations(self, model: nn.Module) -> None:
        stack, seen = [model], set()
        while stack:
            module = stack.pop()
            kind, own = type(module), module.__dict__.get("_no_split_modules")
            if own or kind not in seen:
                seen.add(kind)
                names = own or getattr(kind, "_no_split_modules", None)
                if isinstance(names, (list, tuple, set, frozenset)):
                    self.classes.update(names)
            stack += [child for child in module._modules.values() if child is not None]
        if self.classes:
            self._mark(model)

    def _mark(self, module: nn.Module) -> bool:
        if type(module).__name__ in self.classes:
            return True
        # No short-circuit: every child is to be marked.
        holds = [self._mark(child) for child in module._modules.values() if child is not None]
        if any(holds):
            self.declared.add(id(module))
            return True
        return False

    def is_whole(self, module: nn.Module, repeated: bool) -> bool:
        """Whether a module must not be split (a leaf cannot be, which is another matter)."""
        children = module._modules
        if type(module).__name__ in self.classes:
            # The whole model is opened where it has blocks inside, though it is of their class.
            return module is not self.model or not self.divides(module)
        if not children:
            return False
        # These use their children's weights without calling them.
        return (
            repeated or isinstance(module, nn.MultiheadAttention) or "parametrizations" in children
        )

    def children(self, name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, bool]]:
        """The children with their names, and whether each is one of several of its class."""
        dot = f"{name}." if name else ""
        children = [(n, child) for n, child in module._modules.items() if child is not None]
        repeated: Collection[type] = ()
        if self.finds and isinstance(module, _LISTS) and id(module) not in self.declared:
            counts = Counter(type(child) for _, child in children)
            repeated = {kind for kind, count in counts.items() if count > 1}
        for n, child in children:
            is_repeated = type(child) in repeated
            if is_repeated and isinstance(child, _LISTS):  # a list of lists: is there more inside?
                is_repeated = not self.divides(child)
            yield dot + n, child, is_repeated

    def divides(self, module: nn.Module) -> bool:
        """Whether there are blocks inside a module."""
        stack = [module]
        while stack:
            for _, child, repeated in self.children("", stack.pop()):
                if repeated or type(child).__name__ in self.classes:
                    return True
                stack.append(child)
        return False


class _Walk:
    """One walk over a model; `run` is its whole life."""

    def __init__(
        self,
        model: nn.Module,
        named: Collection[str] | str | None,
        dtype: DtypeLike | None,
        special_dtypes: Mapping[str, DtypeLike] | None,
        largest: int | None,
    ) -> None:
        self.model, self.dtype, self.special, self.largest = model, dtype, special_dtypes, largest
        self.splitter = _Splitter(model, named)
        self.ties = Ties()
        self.sizes: list[int] = []
        self.dtypes: list[DtypeLike] = []
        self.blocks: list[Block] = []

    def run(self) -> Inventory:
        self._visit("", self.model, False)
        return Inventory(self.blocks, self.sizes, self.dtypes)

    def _visit(self, name: str, module: nn.Module, repeated: bool) -> None:
        whole = self.splitter.is_whole(module, repeated)
        if whole or not module._modules:
            block = self._block(name, module)
            inner = repeated and type(module).__name__ not in self.splitter.classes
            if not (inner and self._too_large(block) and self.splitter.divides(module)):
                self.blocks.append(block)
                return
        dot = f"{name}." if name else ""
        for n, parameter in module._parameters.items():
            if parameter is not None:
                index = self._tensor(dot + n, parameter)
                size = self.sizes[index]
                self.blocks.append(Block(dot + n, "Parameter", (index,), (), size, size))
        for n, buffer in module._buffers.items():
            if buffer is not None:
                index = self._tensor(dot + n, buffer)
                self.blocks.append(Block(dot + n, "buffer", (), (index,), 0, self.sizes[index]))
        for child_name, child, is_repeated in self.splitter.children(name, module):
            self._visit(child_name, child, is_repeated)

    def _block(self, name: str, module: nn.Module) -> Block:
        """Take a module as one block."""
        parameters: dict[int, None] = {}
        buffers: dict[int, None] = {}
        leaf = leaf_buffers = 0
        stack = [(name, module)]
        while stack:
            path, owner = stack.pop()
            dot = f"{path}." if path else ""
            own = {self._tensor(dot + n, t) for n, t in owner._parameters.items() if t is not None}
            size = sum(self.sizes[t] for t in own)
            leaf, leaf_buffers = max(leaf, size), max(leaf_buffers, size)
            parameters.update(dict.fromkeys(own))
            if owner._buffers:
                more = {
                    self._tensor(dot + n, t) for n, t in owner._buffers.items() if t is not None
                }
                buffers.update(dict.fromkeys(more))
                leaf_buffers = max(leaf_buffers, sum(self.sizes[t] for t in own | more))
            stack += [(dot + n, m) for n, m in owner._modules.items() if m is not None]
        for index in parameters:
            buffers.pop(index, None)
        kind = type(module).__name__
        return Block(name, kind, tuple(parameters), tuple(buffers), leaf, leaf_buffers)

    def _tensor(self, name: str, tensor: torch.Tensor) -> int:
        """The index of a tensor; a tied one has one already."""
        index = self.ties.number(tensor)
        if index == len(self.sizes):
            dtype = dtype_after_load(name, tensor, self.dtype, self.special)
            self.sizes.append(tensor_bytes(tensor, dtype))
            self.dtypes.append(dtype)
        return index

    def _too_large(self, block: Block) -> bool:
        if self.largest is None:
            return False
        return sum(self.sizes[i] for i in (*block.parameters, *block.buffers)) > self.largest
