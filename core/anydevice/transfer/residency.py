"""A residency: one group's weights on a device, from the first copy to the buffer's release."""

from __future__ import annotations

import enum
import operator
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from anydevice.transfer import profile
from anydevice.transfer.buffers import Buffer
from anydevice.transfer.copy_engine import CopyEngine
from anydevice.transfer.copy_plan import CopyPlan, bytes_of
from anydevice.transfer.readahead import read_ahead
from anydevice.transfer.staging import ChunkCopy, divide
from anydevice.transfer.swapping import SwappedTensor, swap_back

__all__ = ["Residency", "ResidencyState"]


class ResidencyState(enum.Enum):
    """Where a residency is in its life."""

    #: No copy is queued, or readers still fill staging buffers for it.
    COPYING = enum.auto()
    #: All copies are queued; `Residency.arrived` marks their end.
    QUEUED = enum.auto()
    #: Device copies stand in the modules.
    IN_USE = enum.auto()
    #: It is over, or was given up.
    RELEASED = enum.auto()


class Residency:
    """Guarded by the engine's lock, but for what readers call.

    Every method that ends something may be called again, so an interrupt in its middle does no
    harm. docs/transfers.md explains how copies and computation are ordered.

    Args:
        engine: of the device.
        group_id: of the group, for the prefetcher.
        owner: the pass that asked for it.

    Attributes:
        state: see `ResidencyState`.
        signature: what the weights were like when they were copied.
        buffer: the copies' memory; None where each is copied by itself, and after the release.
        arrived: the event after which the copies are complete; None while readers are at work.
        error: what went wrong in a reader.
        users: ids of the calls that use the device copies, and their streams.
        swapped: the device copies in their slots.
        copy_ids: ids of the device copies.
        compares: whether changes that no version shows are looked for.
    """

    def __init__(self, engine: CopyEngine, group_id: int = 0, owner: int = 0) -> None:
        self.engine = engine
        self.group_id = group_id
        self.owner = owner
        self.state = ResidencyState.COPYING
        self.signature: object = None
        self.plan: CopyPlan | None = None
        self.buffer: Buffer | None = None
        self.arrived: Any = None
        self.error: BaseException | None = None
        self.span: profile.Span | None = None
        self.users: dict[int, Any] = {}
        self.swapped: list[SwappedTensor] = []
        self.copy_ids: list[int] = []
        self.compares = False
        self._use: profile.Span | None = None
        self._stream: Any = None  # the device copies are ready for its later work
        self._readers: list[tuple[Any, Any]] = []  # streams that used them, and until when
        self._lock = threading.RLock()
        self._expected = 0
        self._queued = threading.Event()

    # ------------------------------------------------------------------ copying

    def start(
        self,
        originals: Sequence[torch.Tensor],
        plan: CopyPlan,
        buffer: Buffer,
        name: str,
        *,
        ahead: bool,
    ) -> None:
        """Queue the copies, or hand them to readers; the host goes on.

        Args:
            originals: the weights, as the plan numbers them.
            plan: the copies.
            buffer: free, and large enough.
            name: of the group, for profiles.
            ahead: whether it starts before they are needed, for profiles.
        """
        self.plan, self.buffer = plan, buffer
        buffer.holder = self
        queue, stager = self.engine.queue, self.engine.stager
        for event in buffer.after:  # what was here before has been read
            queue.wait(queue.copy_stream, event)
        nbytes = sum(piece.nbytes for piece in plan.pieces)
        self.span = profile.copies_start(queue, name, nbytes, len(plan.runs), ahead)
        staged = [run for run in plan.runs if queue.pins and not run.pinned]
        with queue.copying():
            for run in plan.runs:
                if run.pinned or not queue.pins:
                    run.copy(originals, buffer.flat)
        if not staged:
            self._finish()
            return
        chunk = stager.chunk_for(sum(run.nbytes for run in staged))
        sources = [(bytes_of(originals[r.weight], r.nbytes), r.offset) for r in staged]
        chunks = list(divide(sources, chunk))
        if self.span is not None:
            self.span.copies += len(chunks) - len(staged)
        self._expected = len(chunks)
        tensors = [originals[run.weight] for run in staged]
        stager.submit(lambda: read_ahead(tensors))
        for part in chunks:
            stager.send(part, self)

    def _finish(self) -> None:
        queue = self.engine.queue
        self.arrived = queue.record(queue.copy_stream)
        if self.state is ResidencyState.COPYING:
            self.state = ResidencyState.QUEUED
        if self.span is not None:
            self.span.end_at(queue, queue.copy_stream, self.arrived)
        self._queued.set()

    def is_wanted(self) -> bool:
        """Whether readers must go on."""
        return self.state is not ResidencyState.RELEASED

    def deliver(self, chunk: ChunkCopy, memory: torch.Tensor) -> Any:
        """Called by a reader: queue the copy of a chunk."""
        queue = self.engine.queue
        with self._lock:
            buffer = self.buffer
            if buffer is None or not self.is_wanted():
                return None
            with queue.copying():
                buffer.flat.narrow(0, chunk.offset, chunk.nbytes).copy_(memory, non_blocking=True)
            event = queue.record(queue.copy_stream)
            self._expected -= 1
            if self._expected == 0:
                self._finish()
            return event

    def fail(self, error: BaseException) -> None:
        """Called by a reader that could not do its part."""
        self.error = error
        self._queued.set()

    def wait_queued(self) -> None:
        """Wait until all its copies are queued."""
        if self.buffer is not None:
            self._queued.wait()

    def arrive(self) -> None:
        """Let the current stream's later work find the weights in the buffer.

        Waits for readers, if any are at work, and not for the device.

        Raises:
            Exception: what a reader raised.
        """
        self.wait_queued()
        if self.error is not None:
            raise self.error
        self.engine.queue.wait(self.engine.queue.current_stream(), self.arrived)

    def data(self, originals: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The weights in the buffer, by their index in ``originals``."""
        buffer, plan = self.buffer, self.plan
        if buffer is None or plan is None:
            return {}
        return {p.weight: buffer.tensor(p.offset, originals[p.weight]) for p in plan.pieces}

    # ------------------------------------------------------------------ use

    def expect(self, name: str) -> None:
        """A call is about to wait for the weights of a group."""
        self._use = profile.use_starts(self.engine.queue, name, self.span)

    def swap_in(self, swapped: list[SwappedTensor]) -> None:
        """Put the device copies into their slots: all of them, or none at an interrupt."""
        self._stream = self.engine.queue.current_stream()
        self.swapped, self.state = swapped, ResidencyState.IN_USE
        tables = [swap.slot.table for swap in swapped]
        names = [swap.slot.name for swap in swapped]
        copies = [swap.copy for swap in swapped]
        # One call that runs no Python code, where tables are dicts: nothing can interrupt it.
        deque(map(operator.setitem, tables, names, copies), maxlen=0)

    def join(self, call: int) -> None:
        """A call uses the device copies, on the calling thread's current stream."""
        queue = self.engine.queue
        here = queue.current_stream()
        self.users[call] = here
        if here != self._stream:
            queue.wait(here, queue.record(self._stream))

    def part(self, call: int) -> bool:
        """A call is over; return whether no call uses the device copies any more."""
        queue = self.engine.queue
        if call in self.users:
            here = queue.current_stream()
            if here is not None:
                readers = [r for r in self._readers if r[0] != here]
                if len(self.users) > 1:
                    readers.append((here, queue.record(here)))
                self._readers = readers
            del self.users[call]
        return not self.users

    def end(self) -> None:
        """Put the originals back, with the changes made on the device; release the memory."""
        if self.state is not ResidencyState.IN_USE:
            self.cancel()
            return
        queue = self.engine.queue
        here = queue.current_stream()
        if self._use is not None:
            self._use.end_at(queue, here, queue.record(here))
        for _, event in self._readers:
            queue.wait(here, event)  # for what they changed, too
        try:
            swap_back(self.swapped, queue.torch_device, compares=self.compares)
        finally:
            if not self.swapped:
                self._release([queue.record(here)])

    def cancel(self) -> None:
        """Give up: copies that are queued still complete, others are never queued."""
        with self._lock:
            if self.state is ResidencyState.RELEASED and self.buffer is None:
                return
            self.state = ResidencyState.RELEASED
            event = self.engine.queue.record(self.engine.queue.copy_stream)
        self._release([event])

    def _release(self, after: list[Any]) -> None:
        buffer = self.buffer
        if buffer is not None:
            self.engine.pool.give_back(buffer, self, after)
        self.buffer = None
        self.state = ResidencyState.RELEASED
