"""Tensors read from their files through bounded buffers, cast and moved on the way.

The bytes wanted of each file are divided into runs, in the order of the file. A few threads take
one run after another: read it into a buffer, then put each tensor's part where it belongs. While
one thread waits for the disk or a device, another casts. So every byte is read once, in order, and
the host memory taken beyond the results is that of the buffers, whatever the size of a shard.

Where a device claims page-locked memory and streams, copies to it are queued and run later:
`StagingRing` has two buffers for each thread then, and fills none that is still being copied from.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import torch

from anydevice.checkpoint.info import TensorInfo
from anydevice.devices import Device
from anydevice.errors import CheckpointNotFoundError, CorruptCheckpointError
from anydevice.interrupts import check, stopper
from anydevice.loading.options import DEFAULT_BUFFER_BYTES
from anydevice.tensors import memory_of
from anydevice.transfer.queue import DeviceQueue
from anydevice.transfer.staging import StagingBuffer, StagingRing

__all__ = ["Request", "stream"]

#: A buffer that a processor's cache holds is cast out of faster than it was read in.
_HOST_RUN: Final = 2 << 20
#: A device likes large copies.
_DEVICE_RUN: Final = 32 << 20
_SMALLEST_RUN: Final = 64 << 10
#: A run begins in its buffer where it begins in the file, modulo this: so dtypes stay aligned.
_ALIGNMENT: Final = 64


@dataclasses.dataclass(eq=False)
class Request:
    """A tensor that is wanted from a file.

    Attributes:
        info: where it is; its ``offset`` must be known.
        device: where it is wanted: an accelerator or the host.
        dtype: in which it is wanted.
        shape: in which it is wanted.
        into: an existing tensor to fill, on ``device`` and contiguous; None makes a new one.
        result: the tensor, once `stream` has returned.
    """

    info: TensorInfo
    device: Device
    dtype: torch.dtype
    shape: torch.Size
    into: torch.Tensor | None = None
    result: torch.Tensor | None = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock, repr=False)

    def destination(self) -> torch.Tensor:
        """The whole result, flat, to be filled in parts."""
        with self._lock:
            if self.result is None:
                self.result = (
                    self.into
                    if self.into is not None
                    else torch.empty(self.shape, dtype=self.dtype, device=self.device.torch)
                )
            return self.result.detach().view(-1)


class _Part(NamedTuple):
    """Some elements of a request, and where their bytes are in the file."""

    request: Request
    start: int
    stop: int
    offset: int
    nbytes: int


class _Run(NamedTuple):
    """Bytes of one file that are read at once, for one device."""

    file: str
    offset: int
    nbytes: int
    parts: list[_Part]


def stream(
    requests: Sequence[Request],
    *,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    workers: int | None = None,
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Read tensors, each byte once, and leave them in the requests' ``result``.

    Args:
        requests: what is wanted, in any order.
        buffer_bytes: of all buffers together.
        workers: how many threads read; by default a few more than there are processors.
        advance: called with the number of bytes each time some are done, from any thread.

    Raises:
        CorruptCheckpointError: a file is shorter than it was.
        CheckpointNotFoundError: a file is gone.
    """
    workers = workers or min(8, (os.cpu_count() or 1) + 2)
    by_device: dict[Device, list[Request]] = defaultdict(list)
    for request in requests:
        by_device[request.device].append(request)
    for device, wanted in by_device.items():
        longest = _DEVICE_RUN if device.is_accelerator else _HOST_RUN
        longest = max(_SMALLEST_RUN, min(longest, buffer_bytes // (2 * workers)))
        runs = list(_runs(wanted, longest))
        _Stream(device, runs, longest, advance).run(min(workers, len(runs)))


def _runs(requests: Iterable[Request], longest: int) -> Iterator[_Run]:
    """Divide requests into runs: neighbours in the file together, long tensors in several."""
    parts: list[_Part] = []
    start = end = 0
    # Names of one storage, as in torch files, come side by side so, and are read once.
    order = sorted(_parts(requests, longest), key=lambda p: (p.request.info.file, p.offset))
    for part in order:
        new_end = part.offset + part.nbytes
        same = parts and parts[0].request.info.file == part.request.info.file
        if parts and not (same and part.offset <= end + 4096 and new_end - start <= longest):
            yield _Run(parts[0].request.info.file, start, end - start, parts)
            parts = []
        if not parts:
            start = end = part.offset
        parts.append(part)
        end = max(end, new_end)
    if parts:
        yield _Run(parts[0].request.info.file, start, end - start, parts)


def _parts(requests: Iterable[Request], longest: int) -> Iterator[_Part]:
    for request in requests:
        info = request.info
        assert info.offset is not None
        itemsize = info.dtype.itemsize
        count = info.nbytes // itemsize
        step = max(1, longest // itemsize)
        for start in range(0, count, step) if count else (0,):
            stop = min(start + step, count)
            offset = info.offset + start * itemsize
            yield _Part(request, start, stop, offset, (stop - start) * itemsize)


class _Stream:
    """The reading of all runs for one device."""

    def __init__(
        self, device: Device, runs: list[_Run], longest: int, advance: Callable[[int], object]
    ) -> None:
        self.queue = DeviceQueue(device)
        self._longest = longest
        self._advance = advance
        self._count = len(runs)
        self._runs = iter(runs)
        self._lock = threading.Lock()
        self._stopped = False
        self._must_stop = stopper()

    def run(self, workers: int) -> None:
        """Work until everything is done, or the first failure."""
        count = min(self._count, 2 * workers if self.queue.pins else workers)
        ring = StagingRing(self.queue, self._longest + _ALIGNMENT, max(1, count))
        with ThreadPoolExecutor(max(1, workers), "anydevice-load") as pool:
            try:
                for future in [pool.submit(self._work, ring) for _ in range(workers)]:
                    future.result()
            finally:
                self._stopped = True
        ring.drain()
        check()
        if self.queue.device.is_accelerator:
            # The results may be used on any stream after this.
            self.queue.backend.synchronize(self.queue.index)

    def _work(self, ring: StagingRing) -> None:
        file = _File()
        try:
            with torch.no_grad():
                for run in self._take():
                    buffer = ring.acquire()
                    try:
                        self._load(run, buffer, file)
                    finally:
                        ring.release(buffer)
                    self._advance(sum(part.nbytes for part in run.parts))
        except BaseException:
            self._stopped = True
            raise
        finally:
            file.close()

    def _take(self) -> Iterator[_Run]:
        while not self._stopped and not self._must_stop():
            with self._lock:
                run = next(self._runs, None)
            if run is None:
                return
            yield run

    def _load(self, run: _Run, buffer: StagingBuffer, file: _File) -> None:
        """Read a run, and put each part where it belongs."""
        shift = run.offset % _ALIGNMENT
        file.read(run, memory_of(buffer.tensor)[shift : shift + run.nbytes])
        try:
            for part in run.parts:
                start = shift + part.offset - run.offset
                source = buffer.tensor[start : start + part.nbytes]
                dtype = part.request.info.dtype
                if start % dtype.itemsize:  # not where the hardware needs elements of this dtype
                    source = source.clone()
                _put(part, source.view(dtype), self.queue, buffer.pinned)
        finally:
            if buffer.pinned:
                buffer.event = self.queue.record(self.queue.current_stream())


class _File:
    """The file that a thread reads: the last one stays open."""

    def __init__(self) -> None:
        self._file: Any = None

    def read(self, run: _Run, memory: memoryview) -> None:
        """Fill memory with a run.

        Raises:
            CorruptCheckpointError: the file is shorter than it was.
            CheckpointNotFoundError: it is gone.
        """
        try:
            if self._file is None or self._file.name != run.file:
                self.close()
                self._file = open(run.file, "rb", buffering=0)  # noqa: SIM115 - see `close`
            self._file.seek(run.offset)
            done = 0
            while done < run.nbytes:
                count = self._file.readinto(memory[done:])
                if not count:
                    raise CorruptCheckpointError(
                        f"{run.file} ended at byte {run.offset + done:,} while it was read: it has "
                        "changed since it was opened. Load it again when it is whole."
                    )
                done += count
        except FileNotFoundError as error:
            raise CheckpointNotFoundError(f"{run.file} is gone since it was opened") from error

    def close(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _put(part: _Part, source: torch.Tensor, queue: DeviceQueue, pinned: bool) -> None:
    """Move some elements to their place in the result, on its device and in its dtype."""
    request = part.request
    whole = part.stop - part.start == request.shape.numel()
    if not queue.device.is_accelerator:
        request.destination()[part.start : part.stop].copy_(source)
        return
    backend = queue.backend
    if source.dtype != request.dtype and not backend.supports_dtype(source.dtype):
        source, pinned = source.to(request.dtype), False
    if whole and request.into is None:
        moved = backend.move(source.view(request.shape), queue.torch_device, non_blocking=pinned)
        request.result = moved if moved.dtype == request.dtype else moved.to(request.dtype)
        return
    # Straight into its place, so that the device never holds a part twice; cast before the copy.
    if source.dtype != request.dtype:
        source, pinned = source.to(request.dtype), False
    request.destination()[part.start : part.stop].copy_(source, non_blocking=pinned)
