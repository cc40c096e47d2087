"""Casting and moving weights: at once, or in pieces while they are written to disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Final

import torch

from anydevice import registry
from anydevice.checkpoint.info import TensorInfo
from anydevice.devices import CPU, DISK
from anydevice.loading.match import Target
from anydevice.loading.options import LoadOptions
from anydevice.loading.streaming import Request, stream
from anydevice.offload_store.tensor_bytes import PIECE, WeightSource, pieces_of
from anydevice.tensors import move_tensor

__all__ = ["convert", "source_for_disk"]

#: Below this many bytes buffers and threads cost more than they save.
_SMALL: Final = 1 << 20


def convert(tensor: torch.Tensor, target: Target) -> torch.Tensor:
    """On its device (for the disk: on the host) and in its dtype."""
    device = CPU if target.device == DISK else target.device
    if device.is_accelerator:
        backend = registry.get_backend(device.type)
        if tensor.dtype != target.dtype and not backend.supports_dtype(tensor.dtype):
            tensor = tensor.to(target.dtype)
    return move_tensor(tensor, device).to(target.dtype)


def source_for_disk(
    target: Target,
    host: Callable[[], torch.Tensor],
    options: LoadOptions,
    begun: Callable[[Target], object],
) -> WeightSource:
    """A weight that is converted piece by piece while it is written.

    ``host`` gives it on the host, in the file's dtype; ``begun`` is called when it is made, which
    it is not where the folder has it already.
    """

    def load() -> torch.Tensor | Iterator[torch.Tensor]:
        begun(target)
        if target.info.nbytes <= _SMALL:
            return convert(host(), target)
        if target.info.offset is None:
            return (convert(piece, target) for piece in pieces_of(target.name, host()))
        return _read_pieces(target, options)

    return WeightSource(target.dtype, target.shape, load, _identity(target))


def _read_pieces(target: Target, options: LoadOptions) -> Iterator[torch.Tensor]:
    """Elements in order, flat. Of ``buffer_bytes`` a half is for reading; the writer holds some."""
    info = target.info
    assert info.offset is not None
    widest = max(info.dtype.itemsize, target.dtype.itemsize)
    step = max(_SMALL, min(PIECE, options.buffer_bytes // 8)) // widest
    total = target.shape.numel()
    for start in range(0, total, step):
        shape = torch.Size([min(step, total - start)])
        offset = info.offset + start * info.dtype.itemsize
        piece = TensorInfo.describe(info.dtype, shape, info.file, offset)
        request = Request(piece, CPU, target.dtype, shape)
        stream([request], buffer_bytes=options.buffer_bytes // 2, workers=options.workers)
        assert request.result is not None
        yield request.result


def _identity(target: Target) -> str | None:
    """Names the bytes, so that they are found again in a folder without being made."""
    info = target.info
    if info.offset is None:
        return None
    state = os.stat(info.file)
    return (
        f"file:{os.path.realpath(info.file)}:{state.st_size}:{state.st_mtime_ns}:"
        f"{info.offset}:{info.dtype}>{target.dtype}"
    )
