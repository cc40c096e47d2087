"""The storages of a log that are real: their content is in host memory."""

from __future__ import annotations

import torch

from anydevice.errors import ModelError
from anydevice.init_empty.steps import View

__all__ = ["RealStorages"]


class RealStorages(dict[int, torch.UntypedStorage]):
    """Storages on the host by their addresses in the log, and tensors that are views of them."""

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
        base = torch.empty(0, dtype=view.dtype, device="cpu")
        tensor = base.set_(storage, view.offset, view.size, view.stride)
        tensor = torch._neg_view(tensor) if view.is_neg else tensor
        return tensor.conj() if view.is_conj else tensor
