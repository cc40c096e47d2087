"""What was copied, for which group, and how long devices waited: `profile_transfers`.

Times are the host's. A thread for each stream waits for one mark after the other and looks at the
clock, so nothing else is held up; while no profile is taken, nothing of this exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from anydevice.text import lay_out_table
from anydevice.transfer.chrome_trace import write_trace
from anydevice.transfer.group_transfers import GroupTransfers
from anydevice.transfer.queue import DeviceQueue

__all__ = [
    "Span",
    "TransferProfile",
    "copies_alone",
    "copies_start",
    "profile_transfers",
    "use_starts",
]


@dataclasses.dataclass
class Span:
    """A time that something took; seconds since the profile began.

    Attributes:
        group: its name.
        device: where its weights were needed.
        row: ``"link"`` for copies, ``"compute"`` for the time that device copies were in the slots.
        profile: the profile that it is part of.
        nbytes: that were copied.
        copies: that it took.
        ahead: whether it started before it was needed.
        begin: when the device got to it; None where that was not seen.
        end: when the device was done.
        link: of a use: the copies that it needed.
    """

    group: str
    device: str
    row: str
    profile: TransferProfile = dataclasses.field(repr=False)
    nbytes: int = 0
    copies: int = 0
    ahead: bool = False
    begin: float | None = None
    end: float | None = None
    link: Span | None = None

    def begin_at(self, queue: DeviceQueue, stream: Any) -> None:
        """It begins when the device gets to what is queued on a stream now."""
        self.profile.set_when(queue, stream, queue.record(stream), self, "begin")

    def end_at(self, queue: DeviceQueue, stream: Any, event: Any) -> None:
        """It ends when an event of a stream is reached."""
        self.profile.set_when(queue, stream, event, self, "end")

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.end - self.begin) if self.begin is not None and self.end else 0.0

    @property
    def waited(self) -> float:
        """How long the device stood still for a residency's weights, in seconds."""
        if self.link is None or self.link.end is None or self.begin is None:
            return 0.0
        return max(0.0, self.link.end - self.begin)


class TransferProfile:
    """Made by `profile_transfers`; complete when its context has ended."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spans: list[Span] = []
        self._watchers: dict[Any, _Watcher] = {}
        self._lock = threading.Lock()
        self._ended = False

    # ------------------------------------------------------------------ results

    @property
    def groups(self) -> list[GroupTransfers]:
        """What each group cost, in the order in which they first came."""
        groups: dict[tuple[str, str], list[Span]] = {}
        for span in self._spans:
            groups.setdefault((span.group, span.device), []).append(span)
        return [GroupTransfers.of(*names, spans) for names, spans in groups.items()]

    @property
    def bytes(self) -> int:
        """Bytes that were copied."""
        return self._sum().bytes

    @property
    def copies(self) -> int:
        """Copies that it took."""
        return self._sum().copies

    @property
    def waited(self) -> float:
        """Seconds for which devices stood still for weights."""
        return self._sum().waited

    @property
    def overlap(self) -> float:
        """The part of the copies' time for which no device waited, from 0 to 1."""
        total = self._sum()
        return max(0.0, 1.0 - total.waited / total.seconds) if total.seconds else 0.0

    def _sum(self) -> GroupTransfers:
        return GroupTransfers.of("all", "", self._spans)

    def table(self) -> str:
        """A line for each group, and the sum."""
        head = ("GROUP", "DEVICE", "USES", "AHEAD", "MB", "COPIES", "COPY ms", "WAITED ms")
        groups = [*self.groups, self._sum()]
        rows = [head, *(group.cells() for group in groups)]
        body = lay_out_table(rows, numbers=range(2, len(head)))
        return f"{body}\noverlap {self.overlap:.0%}"

    __str__ = table

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> Path:
        """Write a trace in Chrome's format, for ui.perfetto.dev or chrome://tracing.

        Each device is a process of the trace, with a row for its copies and one for the time in
        which its blocks compute.

        Args:
            path: a file; by custom it ends in ``.json``.

        Returns:
            The file.

        Raises:
            OptionError: it cannot be written.
        """
        return write_trace(self._spans, path)

    # ------------------------------------------------------------------ for spans

    def now(self) -> float:
        """Seconds since the profile began."""
        return time.perf_counter() - self._start

    def note(self, span: Span) -> None:
        """Take note of a span."""
        with self._lock:
            self._spans.append(span)

    def set_when(self, queue: DeviceQueue, stream: Any, event: Any, span: Span, field: str) -> None:
        """Set a span's field to the time at which an event of a stream is reached."""
        if event is None:
            setattr(span, field, self.now())
            return
        key = (queue.device, str(stream))
        with self._lock:
            if self._ended:
                return
            watcher = self._watchers.get(key)
            if watcher is None:
                watcher = self._watchers[key] = _Watcher(queue, self.now)
            watcher.marks.put((event, span, field))

    def _close(self) -> None:
        with self._lock:
            self._ended = True
        for watcher in self._watchers.values():
            watcher.marks.put(None)
            watcher.thread.join()


class _Watcher:
    """Waits for one mark of a stream after the other."""

    def __init__(self, queue: DeviceQueue, now: Callable[[], float]) -> None:
        self.marks: SimpleQueue[tuple[Any, Span, str] | None] = SimpleQueue()
        self._wait, self._now = queue.synchronize, now
        self.thread = threading.Thread(target=self._run, name="anydevice-profile", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (mark := self.marks.get()) is not None:
            event, span, field = mark
            self._wait(event)
            setattr(span, field, self._now())


#: The profile that is being taken, if any.
_active: TransferProfile | None = None


def copies_start(
    queue: DeviceQueue, group: str, nbytes: int, copies: int, ahead: bool
) -> Span | None:
    """The copies of a group begin on the device's copy stream; None while no profile is taken."""
    span = _new(queue, group, "link", nbytes, copies, ahead)
    if span is not None:
        span.begin_at(queue, queue.copy_stream)
    return span


def copies_alone(queue: DeviceQueue, group: str, tensor: torch.Tensor) -> Span | None:
    """A tensor is copied by itself, and the host waits; None if it is there or without profile."""
    if tensor.device == queue.torch_device:
        return None
    span = _new(queue, group, "link", tensor.nbytes, 1)
    if span is not None:
        span.begin = span.profile.now()
    return span


def use_starts(queue: DeviceQueue, group: str, link: Span | None) -> Span | None:
    """Device copies are used on the calling thread's current stream; None without profile."""
    span = _new(queue, group, "compute")
    if span is not None:
        span.link = link
        span.begin_at(queue, queue.current_stream())
    return span


def _new(
    queue: DeviceQueue, group: str, row: str, nbytes: int = 0, copies: int = 0, ahead: bool = False
) -> Span | None:
    profile = _active
    if profile is None:
        return None
    span = Span(group, str(queue.device), row, profile, nbytes, copies, ahead)
    profile.note(span)
    return span


@contextlib.contextmanager
def profile_transfers() -> Iterator[TransferProfile]:
    """Record every copy of an offloaded weight, in all threads, while the context lasts.

    Its end waits for copies that are still running. Of nested contexts, the innermost records.

    Yields:
        The profile; print it, or see `TransferProfile`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice import cpu_offload, profile_transfers
        >>> model = cpu_offload(nn.Linear(4, 2), "cpu")
        >>> with profile_transfers() as profile:
        ...     output = model(torch.ones(1, 4))
        >>> profile.bytes  # the device is the host itself: nothing is copied
        0
    """
    global _active
    before, profile = _active, TransferProfile()
    _active = profile
    try:
        yield profile
    finally:
        _active = before
        profile._close()
