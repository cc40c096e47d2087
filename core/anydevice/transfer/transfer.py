"""A transfer: the weights of one group on their way to one buffer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from anydevice.transfer import profile
from anydevice.transfer.copy_plan import CopyPlan, bytes_of
from anydevice.transfer.readahead import read_ahead
from anydevice.transfer.staging import Load, divide

if TYPE_CHECKING:
    from anydevice.transfer.pool import Buffer
    from anydevice.transfer.profile import Span
    from anydevice.transfer.queue import DeviceQueue

__all__ = ["Transfer"]


class Transfer:
    """Weights that travel, or have arrived. docs/transfers.md tells how that is ordered.

    Attributes:
        queue: the device that they go to.
        plan: where each lies in the buffer.
        buffer: where they go; None once it was given back.
        state: what the weights were like when they set out.
        owner: the pass that asked for them.
        group: the id of their group.
        span: what a profile notes of the journey.
        event: after which they are there; None while readers are at work.
        error: what went wrong in a reader.
    """

    def __init__(
        self,
        queue: DeviceQueue,
        plan: CopyPlan,
        buffer: Buffer,
        state: tuple[Any, ...],
        owner: int,
        group: int,
    ) -> None:
        self.queue = queue
        self.plan = plan
        self.buffer: Buffer | None = buffer
        self.state = state
        self.owner = owner
        self.group = group
        self.event: Any = None
        self.span: Span | None = None
        self.error: BaseException | None = None
        self._lock = threading.RLock()
        self._cancelled = False
        self._expected = 0
        self._queued = threading.Event()

    def start(
        self,
        originals: Sequence[torch.Tensor],
        block: torch.Tensor | None,
        name: str,
        *,
        ahead: bool,
    ) -> None:
        """Queue the copies, or hand them to readers; the host goes on.

        Args:
            originals: the weights, as the layout numbers them.
            block: page-locked memory in which several of them lie.
            name: of the group, for profiles.
            ahead: whether they set out before they are needed, for profiles.
        """
        assert self.buffer is not None
        queue, flat, runs = self.queue, self.buffer.flat, self.plan.runs
        for event in self.buffer.after:  # what was here before has been read
            queue.wait(queue.side, event)
        recorder = profile.active
        if recorder is not None:
            nbytes = sum(piece.nbytes for piece in self.plan.pieces)
            self.span = recorder.departs(queue, name, nbytes, len(runs), ahead)
        pageable = sum(run.nbytes for run in runs if not run.pinned)
        chunk = queue.stager.prepare(pageable) if pageable and queue.pins else 0
        sources = []
        with queue.on_side():
            for run in runs:
                source = bytes_of(originals[run.weight], run.nbytes, block)
                if run.pinned or not chunk:
                    flat.narrow(0, run.offset, run.nbytes).copy_(source, non_blocking=True)
                else:
                    sources.append((source, run.offset))
        loads = list(divide(sources, chunk))
        if self.span is not None and loads:
            self.span.copies += len(loads) - len(sources)
        if not loads:
            self._finish()
            return
        self._expected = len(loads)
        staged = [originals[run.weight] for run in runs if not run.pinned]
        queue.stager.submit(lambda: read_ahead(staged))
        for load in loads:
            queue.stager.send(load, self)

    def _finish(self) -> None:
        self.event = self.queue.mark(self.queue.side)
        recorder = profile.active
        if self.span is not None and recorder is not None:
            recorder.arrives(self.span, self.queue, self.event)
        self._queued.set()

    def is_wanted(self) -> bool:
        """Whether readers shall go on."""
        return not self._cancelled

    def deliver(self, load: Load, chunk: torch.Tensor) -> Any:
        """Called by a reader: queue the journey of a chunk."""
        queue = self.queue
        with self._lock:
            buffer = self.buffer
            if self._cancelled or buffer is None:
                return None
            with queue.on_side():
                buffer.flat.narrow(0, load.offset, load.nbytes).copy_(chunk, non_blocking=True)
            event = queue.mark(queue.side)
            self._expected -= 1
            if self._expected == 0:
                self._finish()
            return event

    def fail(self, error: BaseException) -> None:
        """Called by a reader that could not do its part."""
        self.error = error
        self._queued.set()

    def wait_queued(self) -> None:
        """Wait until all its copies are queued, so that `event` stands for them."""
        self._queued.wait()

    def arrive(self, stream: Any) -> None:
        """Let a stream's later work find the weights in the buffer.

        Waits for readers, if any are at work, and not for the device.

        Raises:
            Exception: what a reader raised.
        """
        self._queued.wait()
        if self.error is not None:
            raise self.error
        self.queue.wait(stream, self.event)

    def data(self, originals: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The weights in the buffer, by their index in ``originals``."""
        assert self.buffer is not None
        buffer = self.buffer
        return {p.weight: buffer.tensor(p.offset, originals[p.weight]) for p in self.plan.pieces}

    def release(self, after: list[Any]) -> None:
        """Give the buffer back: it may be overwritten after these events."""
        buffer, self.buffer = self.buffer, None
        if buffer is not None:
            self.queue.pool.give_back(buffer, after)

    def cancel(self) -> None:
        """Give up: copies that are queued still complete, others are never queued."""
        with self._lock:
            self._cancelled = True
            event = self.queue.mark(self.queue.side)
        self.release([event])
