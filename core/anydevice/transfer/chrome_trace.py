"""Transfers in Chrome's trace event format, which Perfetto reads.

Source: "Trace Event Format" of the Chromium project: complete events (``"ph": "X"``, times in
microseconds), processes and threads by number, their names by metadata events (``"ph": "M"``).
Events of one thread must nest; those that overlap otherwise are on rows of their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from anydevice.errors import OptionError

if TYPE_CHECKING:
    from anydevice.transfer.profile import Span

__all__ = ["trace_events", "write_trace"]

#: Rows of a device, and how they are called.
_ROWS: Final = {"link": "copies", "compute": "compute"}


def trace_events(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """The events of a trace, metadata first; spans that were not seen to end are left out."""
    seen = [s for s in spans if s.begin is not None and s.end is not None]
    processes = {device: i for i, device in enumerate(sorted({s.device for s in seen}), 1)}
    names: list[dict[str, Any]] = [
        _name("process_name", pid, 0, device) for device, pid in processes.items()
    ]
    events: list[dict[str, Any]] = []
    for device, pid in processes.items():
        thread = 0
        for row, title in _ROWS.items():
            for n, lane in enumerate(_lanes(s for s in seen if (s.device, s.row) == (device, row))):
                thread += 1
                names.append(_name("thread_name", pid, thread, f"{title} {n + 1}" if n else title))
                events += [_event(span, pid, thread) for span in lane]
    return names + events


def _lanes(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans in as few rows as hold them without overlap."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin or 0.0):
        for lane in lanes:
            if _micros(lane[-1].end) <= _micros(span.begin):
                lane.append(span)
                break
        else:
            lanes.append([span])
    return lanes


def _micros(seconds: float | None) -> float:
    """Microseconds to the nanosecond, so that sums do not overlap by rounding."""
    return round((seconds or 0.0) * 1e6, 3)


def _event(span: Span, pid: int, thread: int) -> dict[str, Any]:
    begin = _micros(span.begin)
    return {
        "name": span.group,
        "cat": span.row,
        "ph": "X",
        "ts": begin,
        "dur": max(0.0, round(_micros(span.end) - begin, 3)),
        "pid": pid,
        "tid": thread,
        "args": {"bytes": span.nbytes, "copies": span.copies, "ahead": span.ahead},
    }


def _name(kind: str, pid: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": thread, "args": {"name": name}}


def write_trace(spans: Iterable[Span], path: str | os.PathLike[str]) -> Path:
    """Write a trace file.

    Raises:
        OptionError: it cannot be written.
    """
    file = Path(path)
    text = json.dumps({"traceEvents": trace_events(spans), "displayTimeUnit": "ms"})
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"{file} cannot be written: {error.strerror}") from error
    return file
