"""Staging: a ring of host buffers between slow memory and a device.

A buffer is filled from files or pageable memory and copied out of; it is filled again once the
copies out of it are over. Copies from page-locked buffers run concurrently with other work
of the host and the device, so disk, link and computation are busy at once, and little memory is
page-locked.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from anydevice.transfer.copy_plan import ALIGNMENT
from anydevice.transfer.queue import DeviceQueue

if TYPE_CHECKING:
    from anydevice.transfer.residency import Residency

__all__ = ["ChunkCopy", "Stager", "StagingBuffer", "StagingRing", "divide"]

#: Bytes of a chunk: large enough that a copy's latency does not count, small enough that the first
#: one is soon under way.
CHUNK: Final = 16 << 20
_SMALLEST: Final = 64 << 10
_CHUNKS: Final = 4
_READERS: Final = 2


class StagingBuffer:
    """Host memory of a ring.

    Attributes:
        tensor: its bytes.
        pinned: whether they are page-locked.
        event: after which no copy reads it any more; set by the code that queued copies out of it.
    """

    def __init__(self, nbytes: int, queue: DeviceQueue) -> None:
        self.tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self.pinned = False
        self.event: Any = None
        if queue.pins:
            try:
                self.tensor = queue.backend.pin_memory(self.tensor)
                self.pinned = True
            except RuntimeError:  # no more memory may be locked: copies out of it block
                pass


class StagingRing:
    """Buffers of one size for one device, made when first needed. May be used by several threads.

    Args:
        queue: of the device.
        nbytes: of one buffer.
        count: how many there are at most; a thread that finds none waits for one.
    """

    def __init__(self, queue: DeviceQueue, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self._queue = queue
        self._free: SimpleQueue[StagingBuffer | None] = SimpleQueue()
        for _ in range(count):
            self._free.put(None)

    def acquire(self) -> StagingBuffer:
        """A buffer that may be filled."""
        buffer = self._free.get()
        try:
            if buffer is None:
                return StagingBuffer(self.nbytes, self._queue)
            self._queue.synchronize(buffer.event)
            buffer.event = None
            return buffer
        except BaseException:
            self._free.put(buffer)
            raise

    def release(self, buffer: StagingBuffer) -> None:
        """Give a buffer back, with the event of the last copy out of it."""
        self._free.put(buffer)

    def drain(self) -> None:
        """Wait until no copy reads any buffer; all must have been released."""
        while not self._free.empty():
            buffer = self._free.get()
            if buffer is not None:
                self._queue.synchronize(buffer.event)


class ChunkCopy(NamedTuple):
    """What one staging buffer holds.

    Attributes:
        offset: in the device buffer.
        nbytes: how many.
        parts: host bytes, and their offset in the staging buffer.
    """

    offset: int
    nbytes: int
    parts: list[tuple[torch.Tensor, int]]


def divide(sources: Sequence[tuple[torch.Tensor, int]], chunk: int) -> Iterator[ChunkCopy]:
    """Divide host bytes, with their ascending offsets on the device, into chunks of that size."""
    parts: list[tuple[torch.Tensor, int]] = []
    start = end = 0
    for source, offset in sources:
        done = 0
        while done < source.numel():
            at = offset + done
            # Padding may be copied too; a gap of `ALIGNMENT` may be the place of a weight that is
            # page-locked and copied directly.
            if parts and (at - end >= ALIGNMENT or at - start >= chunk):
                yield ChunkCopy(start, end - start, parts)
                parts = []
            if not parts:
                start = at
            take = min(source.numel() - done, start + chunk - at)
            parts.append((source.narrow(0, done, take), at - start))
            end = at + take
            done += take
    if parts:
        yield ChunkCopy(start, end - start, parts)


class Stager:
    """The reader threads of one device and their ring."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._readers: concurrent.futures.ThreadPoolExecutor | None = None
        self._ring: StagingRing | None = None

    def chunk_for(self, nbytes: int) -> int:
        """Bytes of a chunk where so many are to be copied; the ring's buffers have them."""
        size = min(CHUNK, max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        if self._ring is None or size > self._ring.nbytes:
            self._ring = StagingRing(self._queue, size, _CHUNKS)
        return self._ring.nbytes

    def send(self, chunk: ChunkCopy, receiver: Residency) -> None:
        """Let a reader fill a buffer with a chunk, no larger than `chunk_for` said."""
        ring = self._ring
        assert ring is not None
        self.submit(lambda: _fill_and_deliver(ring, chunk, receiver))

    def submit(self, work: Callable[[], None]) -> None:
        """Let a reader do something."""
        if self._readers is None:
            # torch keeps to its number of threads only where a thread has asked for it once.
            self._readers = concurrent.futures.ThreadPoolExecutor(
                _READERS, "anydevice-reader", initializer=torch.get_num_threads
            )
        try:
            self._readers.submit(work)
        except RuntimeError:  # the interpreter is about to end, and no thread may start
            work()

    def close(self, *, wait: bool) -> None:
        """End the readers, and give the ring's memory back."""
        if self._readers is not None:
            self._readers.shutdown(wait=wait)
        self._readers = self._ring = None


def _fill_and_deliver(ring: StagingRing, chunk: ChunkCopy, receiver: Residency) -> None:
    try:
        buffer = ring.acquire()
        try:
            if receiver.is_wanted():
                for source, offset in chunk.parts:
                    buffer.tensor.narrow(0, offset, source.numel()).copy_(source)
                buffer.event = receiver.deliver(chunk, buffer.tensor.narrow(0, 0, chunk.nbytes))
        finally:
            ring.release(buffer)
    except BaseException as error:  # noqa: BLE001 - it is raised where the weights are needed
        receiver.fail(error)
