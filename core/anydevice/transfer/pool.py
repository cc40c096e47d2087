"""Device memory for visiting weights: taken once, used again and again.

The ring of buffers grows to what a forward pass needs and then stays. A buffer goes back together
with the events after which it may be overwritten; nobody waits for them before the next copy does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from anydevice.transfer.copy_plan import ALIGNMENT, count_owners

if TYPE_CHECKING:
    from anydevice.transfer.queue import DeviceQueue

__all__ = ["Buffer", "Pool"]

_MIB: Final = 1 << 20
#: Where the limit has reserve for so many buffers, one more or less does not matter.
_AMPLE: Final = 8


class Buffer:
    """One piece of device memory.

    Attributes:
        flat: its bytes.
        padding: how many of them are no weight's.
        home: the stream that was current when it was taken; its allocator gets it back.
        after: events that must have passed before it is written to.
    """

    __slots__ = ("_owners", "_views", "after", "flat", "home", "padding")

    def __init__(self, flat: torch.Tensor, padding: int, home: Any, after: list[Any]) -> None:
        self.flat = flat
        self.padding = padding
        self.home = home
        self.after = after
        self._views: dict[torch.dtype, torch.Tensor] = {}
        self._owners = count_owners(flat)

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.flat.numel()

    def tensor(self, offset: int, like: torch.Tensor) -> torch.Tensor:
        """View bytes from ``offset`` on as a tensor with the dtype, shape and strides of another.

        It counts its versions by itself, unlike other views, so that a change can be told.
        """
        dtype = like.dtype
        view = self._views.get(dtype)
        if view is None:
            view = self._views[dtype] = self.flat.view(dtype)
        return view.as_strided(like.shape, like.stride(), offset // dtype.itemsize).data

    def is_shared(self) -> bool:
        """Whether somebody else holds a view: an output, a saved tensor of autograd's, a cache.

        Only once nobody does may the memory serve another weight.
        """
        return self._owners is None or count_owners(self.flat) != self._owners + len(self._views)


class Pool:
    """The buffers of one device.

    The limit is for bytes of weights, as budgets are: padding does not count, no more than it does
    where weights original.

    Attributes:
        total: bytes that the buffers have together, used or free.
        padding: how many of them are no weight's.
    """

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._free: list[Buffer] = []  # the one that was given back first comes first
        self.total = 0
        self.padding = 0

    def take(self, nbytes: int, *, padding: int = 0, ahead: bool) -> Buffer | None:
        """Get a buffer of at least so many bytes.

        Args:
            nbytes: how many.
            padding: how many of them are no weight's.
            ahead: whether it is for later; then the answer is None where the limit forbids it.

        Raises:
            RuntimeError: the device is out of memory, as the backend says it.
        """
        size = self._round(nbytes, padding)
        weights = size - padding
        found = self._best(nbytes, within=2 * size + _MIB)
        if found is None and not self._fits(weights):
            found = self._best(nbytes)
        if found is not None:
            self._free.remove(found)
            return found
        while self._free and not self._fits(weights):
            self._drop(self._free.pop(0))
        if ahead and not self._fits(weights):
            return None
        flat = self._queue.allocate(size)
        home = self._queue.here()
        self.total += size
        self.padding += padding
        # The memory may have been another tensor's, whose last reader is still queued there.
        return Buffer(flat, padding, home, [self._queue.mark(home)])

    def give_back(self, buffer: Buffer, after: list[Any]) -> None:
        """Let a buffer serve others, after some events."""
        buffer.after = after
        if buffer.is_shared():
            self._drop(buffer)
        else:
            self._free.append(buffer)

    def clear(self) -> None:
        """Give all free buffers back to the device's allocator."""
        while self._free:
            self._drop(self._free.pop())

    def _round(self, nbytes: int, padding: int) -> int:
        """Near sizes are made equal, so that one buffer serves many.

        The limit still has space for as many buffers as without, and on a device that ran out of
        memory nothing is rounded up.
        """
        if self._queue.tight:
            return nbytes
        step = 2 * _MIB if nbytes > _MIB else 512
        size = -(-nbytes // step) * step
        limit, weights = self._queue.limit, max(1, nbytes - padding)
        if limit is None or limit >= _AMPLE * size:
            return size
        if weights > limit:
            return nbytes
        share = limit // (limit // weights) + padding
        return max(nbytes, min(size, share // ALIGNMENT * ALIGNMENT))

    def _fits(self, weights: int) -> bool:
        limit = self._queue.limit
        return limit is None or self.total - self.padding + weights <= limit

    def _best(self, size: int, within: int | None = None) -> Buffer | None:
        fitting = [
            b for b in self._free if b.nbytes >= size and (within is None or b.nbytes <= within)
        ]
        return min(fitting, key=lambda b: b.nbytes, default=None)

    def _drop(self, buffer: Buffer) -> None:
        # The allocator hands freed memory to the next tensor of its stream at once.
        for event in buffer.after:
            self._queue.wait(buffer.home, event)
        self.total -= buffer.nbytes
        self.padding -= buffer.padding
