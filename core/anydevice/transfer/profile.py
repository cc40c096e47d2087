"""What travelled, for whom, and who had to wait: `profile_transfers`.

Times are the host's. A thread for each stream waits for one mark after the other and looks at the
clock, so nothing else is held up; while no profile is taken, nothing of this exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from anydevice.text import lay_out_table

if TYPE_CHECKING:
    from anydevice.transfer.lane import Lane

__all__ = ["Span", "TransferProfile", "UnitTransfers", "active", "profile_transfers"]


@dataclasses.dataclass
class Span:
    """A time that something took; seconds since the profile began.

    Attributes:
        unit: its name.
        device: where its weights were needed.
        row: ``"link"`` for a journey, ``"compute"`` for the time that twins stood in the slots.
        nbytes: that travelled.
        copies: that it took.
        ahead: whether it set out before it was needed.
        begin: when the device got to it; None where that was not seen.
        end: when the device was done.
        link: of a visit: the journey that it needed.
    """

    unit: str
    device: str
    row: str
    nbytes: int = 0
    copies: int = 0
    ahead: bool = False
    begin: float | None = None
    end: float | None = None
    link: Span | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return max(0.0, self.end - self.begin) if self.begin is not None and self.end else 0.0

    @property
    def waited(self) -> float:
        """How long the device stood still for a visit's weights, in seconds."""
        if self.link is None or self.link.end is None or self.begin is None:
            return 0.0
        return max(0.0, self.link.end - self.begin)


@dataclasses.dataclass(frozen=True)
class UnitTransfers:
    """What a unit's weights cost.

    Attributes:
        unit: its name.
        device: where they were needed.
        visits: how often.
        ahead: how many of these had set out before.
        bytes: that travelled.
        copies: that it took.
        seconds: that the copies took.
        waited: seconds for which the device stood still for them.
    """

    unit: str
    device: str
    visits: int
    ahead: int
    bytes: int
    copies: int
    seconds: float
    waited: float


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
    def units(self) -> list[UnitTransfers]:
        """What each unit cost, in the order in which they first came."""
        groups: dict[tuple[str, str], list[Span]] = {}
        for span in self._spans:
            groups.setdefault((span.unit, span.device), []).append(span)
        return [_sum(unit, device, spans) for (unit, device), spans in groups.items()]

    @property
    def bytes(self) -> int:
        """Bytes that travelled."""
        return sum(span.nbytes for span in self._spans)

    @property
    def copies(self) -> int:
        """Copies that it took."""
        return sum(span.copies for span in self._spans)

    @property
    def waited(self) -> float:
        """Seconds for which devices stood still for weights."""
        return sum(span.waited for span in self._spans)

    @property
    def overlap(self) -> float:
        """The part of the copies' time for which nobody waited, from 0 to 1."""
        seconds = sum(span.seconds for span in self._spans if span.row == "link")
        return max(0.0, 1.0 - self.waited / seconds) if seconds else 0.0

    def table(self) -> str:
        """A line for each unit, and the sum."""
        head = ("UNIT", "DEVICE", "VISITS", "AHEAD", "MB", "COPIES", "COPY ms", "WAITED ms")
        units = self.units
        rows = [head, *(_row(u) for u in units)]
        rows.append(
            _row(
                UnitTransfers(
                    "all",
                    "",
                    sum(u.visits for u in units),
                    sum(u.ahead for u in units),
                    self.bytes,
                    self.copies,
                    sum(u.seconds for u in units),
                    self.waited,
                )
            )
        )
        body = lay_out_table(rows, numbers=range(2, len(head)))
        return f"{body}\noverlap {self.overlap:.0%}"

    __str__ = table

    def to_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for chrome://tracing or ui.perfetto.dev."""
        events = [
            {
                "name": span.unit,
                "cat": span.row,
                "ph": "X",
                "ts": span.begin * 1e6,
                "dur": span.seconds * 1e6,
                "pid": span.device,
                "tid": span.row,
                "args": {"bytes": span.nbytes, "copies": span.copies, "ahead": span.ahead},
            }
            for span in self._spans
            if span.begin is not None and span.end is not None
        ]
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)

    # ------------------------------------------------------------------ for the engine

    def departs(self, lane: Lane, unit: str, nbytes: int, copies: int, ahead: bool) -> Span:
        """A shipment sets out on the lane's side stream."""
        span = Span(unit, str(lane.device), "link", nbytes, copies, ahead)
        self._note(span)
        self._watch(lane, lane.side, span, "begin")
        return span

    def arrives(self, span: Span, lane: Lane, event: Any) -> None:
        """All copies of a shipment are queued; the event tells when they are over."""
        self._watch_event(lane, "side", event, span, "end")

    def travels_alone(self, lane: Lane, unit: str, nbytes: int) -> Span:
        """A tensor travels by itself, while the host waits."""
        span = Span(unit, str(lane.device), "link", nbytes, 1, begin=self._now())
        self._note(span)
        return span

    def enters(self, lane: Lane, unit: str) -> Span:
        """A visit begins on the calling thread's current stream."""
        span = Span(unit, str(lane.device), "compute")
        self._note(span)
        self._watch(lane, lane.here(), span, "begin")
        return span

    def leaves(self, span: Span, lane: Lane) -> None:
        """A visit ends."""
        self._watch(lane, lane.here(), span, "end")

    def now(self, span: Span) -> None:
        """What the host waited for is over."""
        span.end = self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _note(self, span: Span) -> None:
        with self._lock:
            self._spans.append(span)

    def _watch(self, lane: Lane, stream: Any, span: Span, field: str) -> None:
        key = "side" if stream is lane.side and stream is not None else str(stream)
        self._watch_event(lane, key, lane.mark(stream), span, field)

    def _watch_event(self, lane: Lane, key: str, event: Any, span: Span, field: str) -> None:
        if event is None:
            setattr(span, field, self._now())
            return
        with self._lock:
            if self._ended:
                return
            watcher = self._watchers.get((lane.device, key))
            if watcher is None:
                watcher = self._watchers[lane.device, key] = _Watcher(lane, self._now)
            watcher.marks.put((event, span, field))

    def _close(self) -> None:
        with self._lock:
            self._ended = True
        for watcher in self._watchers.values():
            watcher.marks.put(None)
            watcher.thread.join()


class _Watcher:
    """Waits for one mark of a stream after the other."""

    def __init__(self, lane: Lane, now: Any) -> None:
        self.marks: queue.SimpleQueue[tuple[Any, Span, str] | None] = queue.SimpleQueue()
        self._wait, self._now = lane.backend.synchronize_event, now
        self.thread = threading.Thread(target=self._run, name="anydevice-profile", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (mark := self.marks.get()) is not None:
            event, span, field = mark
            self._wait(event)
            setattr(span, field, self._now())


def _sum(unit: str, device: str, spans: list[Span]) -> UnitTransfers:
    journeys = [span for span in spans if span.row == "link"]
    visits = [span for span in spans if span.row == "compute"]
    return UnitTransfers(
        unit,
        device,
        len(visits),
        sum(span.ahead for span in journeys),
        sum(span.nbytes for span in journeys),
        sum(span.copies for span in journeys),
        sum(span.seconds for span in journeys),
        sum(span.waited for span in visits),
    )


def _row(unit: UnitTransfers) -> tuple[str, ...]:
    return (
        unit.unit or "(root)",
        unit.device,
        str(unit.visits),
        str(unit.ahead),
        f"{unit.bytes / 1e6:.1f}",
        str(unit.copies),
        f"{unit.seconds * 1e3:.2f}",
        f"{unit.waited * 1e3:.2f}",
    )


#: The profile that is being taken, if any.
active: TransferProfile | None = None


@contextlib.contextmanager
def profile_transfers() -> Iterator[TransferProfile]:
    """Take note of every weight that travels, in all threads, while the context lasts.

    Its end waits for what is still under way. Where contexts are nested, the innermost takes note.

    Yields:
        The profile; print it, or see `TransferProfile`.
    """
    global active
    before, profile = active, TransferProfile()
    active = profile
    try:
        yield profile
    finally:
        active = before
        profile._close()
