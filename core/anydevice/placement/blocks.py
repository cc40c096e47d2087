"""What is placed: the blocks of a model, in execution order, with their bytes.

A block goes to one device as a whole. It is a module that must not be split, a module without
children, or a parameter or buffer that a split module owns itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from anydevice.dtypes import DtypeLike
from anydevice.placement.splitting import Splitter
from anydevice.sizes import dtype_after_load, tensor_bytes
from anydevice.ties import Ties

__all__ = ["Block", "Inventory", "take_inventory"]


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


def take_inventory(
    model: nn.Module,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    largest: int | None = None,
    *,
    layers: bool = False,
) -> Inventory:
    """List the blocks of a model. One walk.

    Args:
        model: on any device, meta too.
        no_split_module_classes: see `find_blocks`.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        largest: bytes that a device can give at most. A block found without being named that is
            larger is divided where it has repeated children of its own.
        layers: divide all blocks that are found without being named or declared.
    """
    splitter = Splitter(model, no_split_module_classes)
    if layers:
        splitter.finds = False
    return _Walk(model, splitter, dtype, special_dtypes, largest).run()


class _Walk:
    """One walk over a model; `run` is its whole life."""

    def __init__(
        self,
        model: nn.Module,
        splitter: Splitter,
        dtype: DtypeLike | None,
        special_dtypes: Mapping[str, DtypeLike] | None,
        largest: int | None,
    ) -> None:
        self.model, self.dtype, self.special, self.largest = model, dtype, special_dtypes, largest
        self.splitter = splitter
        self.ties = Ties()
        self.sizes: list[int] = []
        self.dtypes: list[DtypeLike] = []
        self.blocks: list[Block] = []

    def run(self) -> Inventory:
        stack = [("", self.model, False)]
        while stack:
            name, module, repeated = stack.pop()
            if self._take(name, module, repeated):
                continue
            dot = f"{name}." if name else ""
            self._take_own(dot, module)
            stack += [
                (dot + n, child, again)
                for n, child, again in reversed(self.splitter.children(module))
            ]
        return Inventory(self.blocks, self.sizes, self.dtypes)

    def _take(self, name: str, module: nn.Module, repeated: bool) -> bool:
        """Take a module as one block, if it is one."""
        if module._modules and not self.splitter.is_whole(module, repeated):
            return False
        block = self._block(name, module)
        found = repeated and type(module).__name__ not in self.splitter.classes
        if found and self._too_large(block) and self.splitter.divides(module):
            return False
        self.blocks.append(block)
        return True

    def _take_own(self, dot: str, module: nn.Module) -> None:
        """Take the tensors that a split module owns itself as blocks."""
        for n, parameter in module._parameters.items():
            if parameter is not None:
                index = self._tensor(dot, n, parameter)
                size = self.sizes[index]
                self.blocks.append(Block(dot + n, "Parameter", (index,), (), size, size))
        for n, buffer in module._buffers.items():
            if buffer is not None:
                index = self._tensor(dot, n, buffer)
                self.blocks.append(Block(dot + n, "buffer", (), (index,), 0, self.sizes[index]))

    def _block(self, name: str, module: nn.Module) -> Block:
        """A module as one block."""
        parameters: dict[int, None] = {}
        buffers: dict[int, None] = {}
        leaf = leaf_buffers = 0
        sizes, names = self.sizes, bool(self.special)  # without special dtypes, names say nothing
        stack = [(name, module)]
        while stack:
            path, owner = stack.pop()
            dot = f"{path}." if path and names else ""
            if owner._parameters or owner._buffers:
                own = {
                    self._tensor(dot, n, tensor)
                    for n, tensor in owner._parameters.items()
                    if tensor is not None
                }
                parameters.update(dict.fromkeys(own))
                size = sum([sizes[t] for t in own])
                leaf = max(leaf, size)
                if owner._buffers:
                    more = {
                        self._tensor(dot, n, tensor)
                        for n, tensor in owner._buffers.items()
                        if tensor is not None
                    }
                    buffers.update(dict.fromkeys(more))
                    size = sum([sizes[t] for t in own | more])
                leaf_buffers = max(leaf_buffers, size)
            if owner._modules:
                stack += [(dot + n, m) for n, m in owner._modules.items() if m is not None]
        if buffers:
            for index in parameters:
                buffers.pop(index, None)
        kind = type(module).__name__
        return Block(name, kind, tuple(parameters), tuple(buffers), leaf, leaf_buffers)

    def _tensor(self, dot: str, name: str, tensor: torch.Tensor) -> int:
        """The index of a tensor; a tied one has one already."""
        index = self.ties.number(tensor)
        if index == len(self.sizes):
            dtype: DtypeLike
            if self.special:
                dtype = dtype_after_load(dot + name, tensor, self.dtype, self.special)
            elif self.dtype is not None and tensor.dtype.is_floating_point:
                dtype = self.dtype
            else:
                dtype = tensor.dtype
            self.sizes.append(tensor_bytes(tensor, dtype))
            self.dtypes.append(dtype)
        return index

    def _too_large(self, block: Block) -> bool:
        if self.largest is None:
            return False
        return sum(self.sizes[i] for i in (*block.parameters, *block.buffers)) > self.largest
