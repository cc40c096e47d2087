"""Which tensors see a storage of a log, as far as Python code can hold them."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from anydevice.tensors import storage_address

__all__ = ["Holders", "swap"]


class Holders(dict[int, dict[int, weakref.ref[torch.Tensor]]]):
    """References to tensors by the storages that they see, or saw, and by their ids."""

    def add(self, storage: int, tensor: torch.Tensor) -> None:
        """Note a tensor that sees a storage."""
        self.setdefault(storage, {})[id(tensor)] = weakref.ref(tensor)

    def have_parameter(self, storage: int) -> bool:
        """Whether a parameter sees a storage, which then stays on meta."""
        return any(isinstance(tensor, nn.Parameter) for tensor in self._seeing(storage))

    def tensors(self, storage: int) -> list[torch.Tensor]:
        """What sees a storage, except parameters."""
        return [t for t in self._seeing(storage) if not isinstance(t, nn.Parameter)]

    def _seeing(self, storage: int) -> list[torch.Tensor]:
        alive = (reference() for reference in self.get(storage, {}).values())
        return [t for t in alive if t is not None and storage_address(t) == storage]


def swap(tensor: torch.Tensor, real: torch.Tensor) -> None:
    """Let a tensor be a real one, as the same object."""
    new = torch.Tensor._make_subclass(type(tensor), real, tensor.requires_grad)
    new.__dict__.update(tensor.__dict__)
    torch._C._swap_tensor_impl(tensor, new)
