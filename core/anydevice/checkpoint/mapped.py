"""Files as memory: one private mapping a file, and tensors that are views of it.

A view costs no read and no copy: its pages are read from the file when they are used, and the
system may drop them again while they are unchanged. Writing to a view changes this process's
memory and never the file.

Every view is a tensor with a storage of its own, no larger than itself. So saving, copying or
pickling one of them takes its bytes alone, not the file's.
"""

from __future__ import annotations

import bisect
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final

import torch

from anydevice.checkpoint.file_identity import FileIdentity, FileSlice, cannot_open
from anydevice.checkpoint.system_mapping import map_descriptor, read_ahead, view_of
from anydevice.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from anydevice.tensors import PLAIN_TYPES

__all__ = ["MappedFile", "backing_of", "is_unwritten", "map_file"]

_PAGE: Final = mmap.PAGESIZE


class MappedFile:
    """A file that is mapped into memory. Made by `map_file`.

    Attributes:
        path: absolute.
        identity: of the file when it was mapped.
    """

    def __init__(self, path: str, identity: FileIdentity, mapping: Any) -> None:
        self.path: Final = path
        self.identity: Final = identity
        self._mapping = mapping  # None for an empty file, which cannot be mapped

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.identity.size

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes out; fewer where the file ends."""
        return (
            b""
            if self._mapping is None
            else bytes(view_of(self._mapping)[offset : offset + nbytes])
        )

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor that views the file's bytes from ``offset`` on; no byte is read yet.

        Where ``offset`` is not a multiple of the dtype's size, the hardware cannot read it in
        place: that tensor is a copy.

        Raises:
            CorruptCheckpointError: the file has fewer bytes.
        """
        count = math.prod(shape)
        nbytes = count * dtype.itemsize
        if offset < 0 or offset + nbytes > self.nbytes:
            raise CorruptCheckpointError(
                f"{self.path} has {self.nbytes} bytes; a tensor should be at {offset} to "
                f"{offset + nbytes}. The file is damaged or cut short: fetch it again."
            )
        if count == 0 or self._mapping is None:
            return torch.empty(tuple(shape), dtype=dtype, device="cpu")
        if offset % dtype.itemsize:
            flat = torch.frombuffer(self._mapping, dtype=torch.uint8, count=nbytes, offset=offset)
            return flat.clone().view(dtype).view(tuple(shape))
        flat = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=offset)
        return flat if len(shape) == 1 else flat.view(tuple(shape))

    def check(self) -> None:
        """Make sure that the file is still the one that was mapped.

        Raises:
            CheckpointNotFoundError: it is gone.
            CorruptCheckpointError: it is another, or was written to.
        """
        now = FileIdentity.of(self.path)
        if now != self.identity:
            raise CorruptCheckpointError(
                f"{self.path} has changed since it was opened ({self.identity.size} bytes then, "
                f"{now.size} now): its weights can no longer be trusted. Load the model again."
            )

    def will_need(self, offset: int, nbytes: int) -> None:
        """Tell the system that these bytes are about to be used, so that it reads ahead."""
        if self._mapping is not None:
            start = offset // _PAGE * _PAGE
            read_ahead(self._mapping, start, min(offset + nbytes, self.nbytes) - start)


# ---------------------------------------------------------------------- making and finding mappings

#: Live mappings by their file and its state, so that a file is mapped once.
_mappings: weakref.WeakValueDictionary[FileIdentity, Any] = weakref.WeakValueDictionary()
#: The same by their address, sorted; dead ones are dropped when the table is next read.
_by_address: list[tuple[int, weakref.ref[Any]]] = []
_lock = threading.RLock()


def _renew_lock() -> None:
    """After a fork: the child must not inherit a lock that another thread held."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def map_file(path: str | os.PathLike[str], *, own: bool = False) -> MappedFile:
    """Map a file, or find the mapping that some live tensor already views.

    Views of one mapping see each other's writes. Weights of a model, which may be written to,
    should come from their own mapping.

    A file that has changed since (size, time of writing, inode) is mapped again; existing
    tensors keep the old mapping.

    Args:
        path: of the file.
        own: make a new mapping, and keep it from later callers.

    Raises:
        CheckpointNotFoundError: it cannot be opened.
        CorruptCheckpointError: it is not a regular file.
    """
    full = os.path.abspath(os.fspath(path))
    with _lock:
        known = None if own else _mappings.get(FileIdentity.of(full))
        if known is not None:
            identity = known.identity
        else:
            identity, known = _map(full)
            if known is not None:
                bisect.insort(_by_address, (known.base, weakref.ref(known)), key=lambda e: e[0])
                if not own:
                    _mappings[identity] = known
    return MappedFile(full, identity, known)


def _map(path: str) -> tuple[FileIdentity, Any]:
    FileIdentity.of(path)  # to open a pipe without a writer would wait for one
    try:
        with open(path, "rb", buffering=0) as file:
            identity = FileIdentity.from_stat(os.fstat(file.fileno()), path)
            if identity.size == 0:
                return identity, None
            mapping = map_descriptor(file.fileno(), identity.size)
    except (OSError, ValueError) as error:
        raise cannot_open(path, error) from None
    mapping.path, mapping.identity = path, identity
    mapping.base = torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr()
    return identity, mapping


def backing_of(tensor: torch.Tensor) -> FileSlice | None:
    """Where in a mapped file a host tensor's bytes came from; None when it is no view of one.

    The tensor may have been written to since, which the file does not know: see `is_unwritten`.
    """
    found = _mapping_of(tensor)
    if found is None:
        return None
    mapping, offset = found
    return FileSlice(mapping.path, offset, tensor.nbytes)


def is_unwritten(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a view of a mapped file, and still has the bytes that are in the file.

    On Linux only the pages that this process has written to are compared with the file; elsewhere
    all of them.
    """
    found = _mapping_of(tensor)
    if found is None:
        return False
    mapping, offset = found
    try:
        if FileIdentity.of(mapping.path) != mapping.identity:
            return False
        with open(mapping.path, "rb") as file:
            for start, nbytes in _written_ranges(mapping, offset, tensor.nbytes):
                file.seek(start)
                if file.read(nbytes) != view_of(mapping)[start : start + nbytes]:
                    return False
    except (OSError, CheckpointNotFoundError, CorruptCheckpointError):
        return False
    return True


def _mapping_of(tensor: torch.Tensor) -> tuple[Any, int] | None:
    """The mapping that a tensor views, and the tensor's offset in the file."""
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "__tensor_flatten__"):
        return None
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    if not tensor.is_contiguous() or tensor.numel() == 0:
        return None
    address = tensor.data_ptr()
    with _lock:
        at = bisect.bisect_right(_by_address, address, key=lambda e: e[0]) - 1
        while at >= 0:
            base, reference = _by_address[at]
            mapping = reference()
            if mapping is not None:
                inside = address + tensor.nbytes <= base + mapping.identity.size
                return (mapping, address - base) if inside else None
            del _by_address[at]
            at -= 1
    return None


def _written_ranges(mapping: Any, offset: int, nbytes: int) -> list[tuple[int, int]]:
    """Offset and length of what may differ from the file, at most 16 MiB each."""
    end, step = offset + nbytes, 16 << 20
    whole = [(at, min(step, end - at)) for at in range(offset, end, step)]
    first = offset // _PAGE
    last = (end - 1) // _PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek((mapping.base // _PAGE + first) * 8)
            raw = file.read((last - first + 1) * 8)
    except OSError:
        return whole
    if len(raw) != (last - first + 1) * 8:
        return whole
    # One 64-bit word a page. Bit 61: the file's own page; 62: swapped out; 63: present. A page
    # that was written to is present or swapped out, and no longer the file's.
    words = torch.frombuffer(bytearray(raw), dtype=torch.int64)
    own = (words >> 61) & 1
    used = ((words >> 62) & 1) | ((words >> 63) & 1)
    written = ((used == 1) & (own == 0)).nonzero().flatten().tolist()
    return [
        (start, min((first + page + 1) * _PAGE, end) - start)
        for page in written
        if (start := max((first + page) * _PAGE, offset)) < end
    ]
