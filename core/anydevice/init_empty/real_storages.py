"""The storages of a log that are real: their content is in host memory."""

from __future__ import annotations

import contextlib
from typing import Final

import torch

from anydevice.errors import ModelError
from anydevice.init_empty.steps import View

__all__ = ["MAX_CONSTANT", "RealStorages", "as_inference", "copied", "references", "seen"]

#: Bytes of a real tensor that is copied into the log where an operation of the log reads it.
MAX_CONSTANT: Final = 1 << 20


def references(storage: torch.UntypedStorage) -> int:
    """How many tensors and handles see a storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def seen(storage: torch.UntypedStorage, view: View) -> torch.Tensor:
    """A tensor that sees a storage as a view says."""
    base = torch.empty(0, dtype=view.dtype, device=storage.device)
    tensor = base.set_(storage, view.offset, view.size, view.stride)
    tensor = torch._neg_view(tensor) if view.is_neg else tensor
    return tensor.conj() if view.is_conj else tensor


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, as these decide how some operations round."""
    copy, storage = tensor.detach().clone(), tensor.untyped_storage()
    if copy.stride() == tensor.stride() or storage.nbytes() > MAX_CONSTANT:
        return copy
    return seen(storage.clone(), View.of(tensor, 0))  # type: ignore[no-untyped-call]


def as_inference(is_on: bool) -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors are those of `torch.inference_mode`, or are not."""
    if is_on == torch.is_inference_mode_enabled():
        return contextlib.nullcontext()
    return torch.inference_mode(is_on)


class RealStorages(dict[int, torch.UntypedStorage]):
    """Storages on the host by their addresses in the log, and tensors that are views of them."""

    def __init__(self) -> None:
        super().__init__()
        self._addresses: dict[int, int] = {}

    def __setitem__(self, address: int, storage: torch.UntypedStorage) -> None:
        self.forget(address)
        super().__setitem__(address, storage)
        self._addresses[storage._cdata] = address

    def forget(self, address: int) -> None:
        """Keep a storage no longer."""
        storage = self.pop(address, None)
        if storage is not None:
            self._addresses.pop(storage._cdata, None)

    def address_of(self, storage: torch.UntypedStorage) -> int | None:
        """The address in the log of a real storage; None for one that is not here."""
        return self._addresses.get(storage._cdata)

    def is_used(self, address: int | None) -> bool:
        """Whether other code has the real storage of an address."""
        storage = self.get(address) if address is not None else None
        return storage is not None and references(storage) > 1

    def store(self, view: View, result: torch.Tensor, nbytes: int) -> None:
        """Take a result as the content of a new storage, in the layout that it had on meta.

        Args:
            view: of the result on meta.
            result: the tensor that was computed.
            nbytes: of the storage on meta.
        """
        fits = result.stride() == view.stride and result.storage_offset() == view.offset
        if fits or not result.numel():
            self[view.storage] = result.untyped_storage()
            return
        self[view.storage] = torch.UntypedStorage(nbytes)  # type: ignore[no-untyped-call]
        self.tensor(view).copy_(result)

    def tensor(self, view: View) -> torch.Tensor:
        """The tensor that is this view of its storage.

        Raises:
            ModelError: the storage is not real.
        """
        storage = self.get(view.storage)
        if storage is None:
            raise ModelError(
                "a tensor made in init_empty_weights depends on a parameter whose values were not "
                "kept. Build the model without init_empty_weights, or make that tensor without "
                "the parameter."
            )
        return seen(storage, view)
