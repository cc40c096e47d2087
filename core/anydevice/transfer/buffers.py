"""Device memory for offloaded weights: allocated once, used again and again.

The pool grows to what a forward pass needs and then stays. A buffer is given back together with the
events after which it may be overwritten; only the next copy into it waits for them.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anydevice.transfer.copy_plan import ALIGNMENT, count_owners
from anydevice.transfer.queue import DeviceQueue

__all__ = ["Buffer", "BufferPool"]

_MIB: Final = 1 << 20
#: Where the limit has space for so many buffers, one more or less does not matter.
_AMPLE: Final = 8


class Buffer:
    """One piece of device memory.

    Attributes:
        flat: its bytes.
        padding: how many of them belong to no weight.
        home: the stream that was current when it was allocated; its allocator gets it back.
        after: events that must have passed before it is written to.
        holder: whose weights it holds; None while it is free.
        freed: grows with each time that a buffer becomes free.
    """

    __slots__ = ("_owners", "_views", "after", "flat", "freed", "holder", "home", "padding")

    def __init__(self, flat: torch.Tensor, padding: int, home: Any, after: list[Any]) -> None:
        self.flat = flat
        self.padding = padding
        self.home = home
        self.after = after
        self.holder: object = None
        self.freed = 0
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._owners = count_owners(flat)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.flat.numel()

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """See `tensor_at`."""
        dtype = like.dtype
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.flat.view(dtype)
        return view.as_strided(like.shape, like.stride(), offset // dtype.itemsize).data

    def is_shared(self) -> bool:
        """Whether another object holds a view: an output, a saved tensor of autograd, a cache.

        The memory must not serve another weight then.
        """
        return self._owners is None or count_owners(self.flat) != self._owners + len(self._views)


class BufferPool:
    """The buffers of one device.

    The limit counts bytes of weights, as budgets do; padding does not count.

    Args:
        queue: of the device.
        limit: bytes that weights may take ahead of time; None for half of what is free.

    Attributes:
        limit: in bytes; None where the device does not tell what is free.
        tight: whether memory ran out once: nothing is allocated ahead of time any more.
    """

    def __init__(self, queue: DeviceQueue, limit: int | None) -> None:
        self._queue = queue
        if limit is None and queue.has_streams:
            free = queue.free_bytes()
            limit = None if free is None else free // 2
        self.limit = limit
        self.tight = False
        self._buffers: list[Buffer] = []
        #: Memory of buffers that others held when they were given back, and its bytes.
        self._kept: list[tuple[Any, int]] = []
        self._clock = itertools.count(1)

    @property
    def total(self) -> int:
        """Bytes that the buffers have together, used or free."""
        return sum(buffer.nbytes for buffer in self._buffers)

    @property
    def padding(self) -> int:
        """How many of them belong to no weight."""
        return sum(buffer.padding for buffer in self._buffers)

    @property
    def kept(self) -> int:
        """Bytes of former buffers that outputs, caches or autograd's graphs still hold."""
        return sum(nbytes for storage, nbytes in self._kept if not storage.expired())

    def take(self, nbytes: int, *, padding: int = 0, ahead: bool) -> Buffer | None:
        """Find or allocate a buffer of at least so many bytes; it is free until it has a holder.

        Args:
            nbytes: how many.
            padding: how many of them belong to no weight.
            ahead: whether it is for later; then the answer is None where the limit forbids it.

        Raises:
            RuntimeError: the device is out of memory, in the backend's own words.
        """
        size = self._round(nbytes, padding)
        weights = size - padding
        found = self._best(nbytes, within=2 * size + _MIB)
        if found is None and not self._fits(weights):
            found = self._best(nbytes)
        if found is not None:
            return found
        while not self._fits(weights) and (free := self._free()):
            self._drop(min(free, key=lambda b: b.freed))
        if ahead and not self._fits(weights):
            return None
        home = self._queue.current_stream()
        # The memory may have been another tensor's, whose last reader is still queued there.
        buffer = Buffer(self._queue.allocate(size), padding, home, [self._queue.record(home)])
        self._buffers.append(buffer)
        return buffer

    def give_back(self, buffer: Buffer, holder: object, after: list[Any]) -> None:
        """Let a holder's buffer serve others, after some events. May be called again."""
        if buffer.holder is not holder:
            return
        buffer.after = after
        buffer.freed = next(self._clock)
        if buffer.is_shared():
            storage: Any = StorageWeakRef(buffer.flat.untyped_storage())  # type: ignore[no-untyped-call]
            self._kept = [k for k in self._kept if not k[0].expired()] + [(storage, buffer.nbytes)]
            self._drop(buffer)
        buffer.holder = None

    def clear(self) -> None:
        """Give all free buffers back to the device's allocator."""
        for buffer in self._free():
            self._drop(buffer)

    def _free(self) -> list[Buffer]:
        return [buffer for buffer in self._buffers if buffer.holder is None]

    def _round(self, nbytes: int, padding: int) -> int:
        """Near sizes are made equal, so that one buffer serves many.

        The limit still has space for as many buffers as without, and on a device that ran out of
        memory nothing is rounded up.
        """
        if self.tight:
            return nbytes
        step = 2 * _MIB if nbytes > _MIB else 512
        size = -(-nbytes // step) * step
        limit, weights = self.limit, max(1, nbytes - padding)
        if limit is None or limit >= _AMPLE * size:
            return size
        if weights > limit:
            return nbytes
        share = limit // (limit // weights) + padding
        return max(nbytes, min(size, share // ALIGNMENT * ALIGNMENT))

    def _fits(self, weights: int) -> bool:
        return self.limit is None or self.total - self.padding + weights <= self.limit

    def _best(self, size: int, within: int | None = None) -> Buffer | None:
        fitting = [
            b for b in self._free() if b.nbytes >= size and (within is None or b.nbytes <= within)
        ]
        return min(fitting, key=lambda b: (b.nbytes, b.freed), default=None)

    def _drop(self, buffer: Buffer) -> None:
        # The allocator hands freed memory to the next tensor of its stream at once.
        for event in buffer.after:
            self._queue.wait(buffer.home, event)
        if buffer in self._buffers:
            self._buffers.remove(buffer)
