"""Weights that are not page-locked: threads copy them through a small ring of chunks that are.

A reader copies from the weights, perhaps from the disk, into a free chunk and queues the chunk's
journey to the device; meanwhile other readers fill other chunks. So disk, link and compute work at
once, and little memory is page-locked.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from anydevice.backend import DeviceBackend
from anydevice.transfer.copy_plan import ALIGNMENT

if TYPE_CHECKING:
    from anydevice.transfer.queue import DeviceQueue

_Chunks: TypeAlias = "SimpleQueue[tuple[torch.Tensor, Any]]"

__all__ = ["CHUNK", "ChunkReceiver", "Load", "Stager", "divide"]

#: Bytes of a chunk: long enough that a copy's start does not count, short enough that the first
#: one is soon under way.
CHUNK: Final = 16 << 20
_SMALLEST: Final = 64 << 10
_CHUNKS: Final = 4
_READERS: Final = 2


class Load(NamedTuple):
    """What one chunk carries.

    Attributes:
        offset: in the device buffer.
        nbytes: how many.
        parts: host bytes, and where they go in the chunk.
    """

    offset: int
    nbytes: int
    parts: list[tuple[torch.Tensor, int]]


class ChunkReceiver(Protocol):
    """Whom a reader works for."""

    def is_wanted(self) -> bool:
        """Whether the load is still wanted."""

    def deliver(self, load: Load, chunk: torch.Tensor) -> Any:
        """Queue the journey of a chunk's bytes; return the event after which it is over."""

    def fail(self, error: BaseException) -> None:
        """Take note that a load could not be copied."""


def divide(sources: Sequence[tuple[torch.Tensor, int]], chunk: int) -> Iterator[Load]:
    """Divide host bytes into loads.

    Args:
        sources: bytes, and their offset in the device buffer, ascending.
        chunk: bytes that a load may have.
    """
    parts: list[tuple[torch.Tensor, int]] = []
    start = end = 0
    for source, offset in sources:
        done = 0
        while done < source.numel():
            at = offset + done
            # Padding may be copied along; a gap of `ALIGNMENT` may be the place of a weight that
            # is page-locked and travels without us.
            if parts and (at - end >= ALIGNMENT or at - start >= chunk):
                yield Load(start, end - start, parts)
                parts = []
            if not parts:
                start = at
            take = min(source.numel() - done, start + chunk - at)
            parts.append((source.narrow(0, done, take), at - start))
            end = at + take
            done += take
    if parts:
        yield Load(start, end - start, parts)


class Stager:
    """The readers and chunks of one device."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._readers: concurrent.futures.ThreadPoolExecutor | None = None
        #: Free chunks, and the event of the journey that each made last.
        self._chunks: _Chunks = SimpleQueue()
        self._size = 0

    def prepare(self, nbytes: int) -> int:
        """Make chunks that suit loads of so many bytes.

        Returns:
            The bytes of a chunk; 0 where no memory can be page-locked.
        """
        size = min(CHUNK, max(_SMALLEST, 1 << (nbytes - 1).bit_length()))
        if size > self._size:
            pin = self._queue.backend.pin_memory
            try:
                chunks = [pin(torch.empty(size, dtype=torch.uint8)) for _ in range(_CHUNKS)]
            except RuntimeError:
                return self._size
            self._chunks = SimpleQueue()  # readers bring the old ones back to the old queue
            for chunk in chunks:
                self._chunks.put((chunk, None))
            self._size = size
        return self._size

    def send(self, load: Load, receiver: ChunkReceiver) -> None:
        """Let a reader copy a load; no larger than `prepare` said."""
        chunks = self._chunks
        self.submit(lambda: _copy_chunk(load, receiver, chunks, self._queue.backend))

    def submit(self, work: Callable[[], None]) -> None:
        """Let a reader do something."""
        if self._readers is None:
            # torch keeps to its number of threads only where a thread has asked for it once.
            self._readers = concurrent.futures.ThreadPoolExecutor(
                _READERS, "anydevice-reader", initializer=torch.get_num_threads
            )
        try:
            self._readers.submit(work)
        except RuntimeError:  # the interpreter is about to end, and no thread may begin
            work()

    def close(self, *, wait: bool) -> None:
        """End the readers, and let the chunks go."""
        if self._readers is not None:
            self._readers.shutdown(wait=wait)
        self._readers = None
        self._chunks = SimpleQueue()
        self._size = 0


def _copy_chunk(
    load: Load, receiver: ChunkReceiver, chunks: _Chunks, backend: DeviceBackend
) -> None:
    chunk, event = chunks.get()
    try:
        if event is not None:  # its last load may still be on the way
            backend.synchronize_event(event)
        event = None
        if receiver.is_wanted():
            for source, offset in load.parts:
                chunk.narrow(0, offset, source.numel()).copy_(source)
            event = receiver.deliver(load, chunk.narrow(0, 0, load.nbytes))
    except BaseException as error:  # noqa: BLE001 - it is raised where the weights are needed
        receiver.fail(error)
    finally:
        chunks.put((chunk, event))
