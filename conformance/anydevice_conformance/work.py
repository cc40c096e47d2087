"""Work that keeps a device busy long enough to see whether somebody waited for it.

Nothing here measures speed. A check queues long work, does what it checks, and asks an event
whether the work is still running: on hardware it is, since it takes far longer than the call; on
the simulator it is, since nothing runs there before something waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject

__all__ = ["LongWork", "is_done", "long_work", "still_running"]

#: Seconds that the work shall take, and that one operation of it shall take at least.
_WHOLE: Final = 0.03
_ONE: Final = 0.0005
_SIDE: Final = (128, 256, 512, 1024, 2048, 4096, 8192)
#: Tries, each with four times the work: a busy machine may let short work finish early.
_TRIES: Final = 4
#: So many times as long as an action is work that cannot end while the action is done, and so often
#: it must have done so.
_LONGER: Final = 8
_TOLD: Final = 3


class LongWork:
    """A chain of matrix products by the identity, on the calling thread's current stream.

    The values are small integers, so that the result is exact in every arithmetic.
    """

    def __init__(self, subject: Subject, index: int) -> None:
        self._subject = subject
        self._index = index
        self._repeats = 1
        side = _SIDE[0]
        for side in _SIDE:
            self._make(side)
            seconds = min(self._time() for _ in range(2))
            if seconds >= _ONE or not self._has_room(side * 2):
                break
        self._repeats = max(8, min(1500, int(_WHOLE / max(seconds, 1e-6))))

    def _make(self, side: int) -> None:
        self.pattern = (torch.arange(side * side) % 61).reshape(side, side).float()
        self._identity = self._subject.put(torch.eye(side), self._index)
        self.start = self._subject.put(self.pattern, self._index)
        self._subject.backend.synchronize(self._index)

    def _time(self) -> float:
        begin = time.perf_counter()
        # Both, so that one of them that is broken does not make the work look short.
        self._subject.fetch(self.run()[:1, :1])
        self._subject.backend.synchronize(self._index)
        return time.perf_counter() - begin

    def _has_room(self, side: int) -> bool:
        try:
            free = self._subject.backend.memory_info(self._index).free
        except Exception:  # noqa: BLE001 - a device that does not say is taken to be large enough
            return side <= 1024
        return side * side * 4 * 16 < free

    def run(self, factor: int = 1) -> torch.Tensor:
        """Queue the work; the result equals `pattern`, when it is there."""
        value = self.start
        for _ in range(self._repeats * factor):
            value = torch.mm(value, self._identity)
        return value


def long_work(subject: Subject, index: int) -> LongWork:
    """The work for a device, measured once a subject."""
    cache: dict[int, LongWork] = subject.__dict__.setdefault("_long_work", {})
    if index not in cache:
        cache[index] = LongWork(subject, index)
    return cache[index]


def is_done(event: Any) -> bool:
    """Whether what an event marks is done; ends the check where events cannot be asked."""
    query = getattr(event, "query", None)
    if query is None:
        left_out("the backend's events have no query(): nothing shows when work is done")
    return bool(query())


def still_running(
    subject: Subject,
    index: int,
    stream: Any,
    action: Callable[[], object],
    *,
    tries: int = _TRIES,
) -> bool:
    """Queue long work on ``stream``, do ``action``; whether the work was then still running.

    Done once before without any work, so that what the action does only the first time (allocate,
    compile) does not count. Tried with more and more work: that it is over tells nothing before it
    takes many times as long as the action by itself. Where none does, on a machine that is too busy
    for it, the action is not held against the backend.
    """
    backend, work = subject.backend, long_work(subject, index)
    action()
    backend.synchronize(index)
    alone, told = None, 0
    for attempt in range(tries):
        with backend.use_stream(stream):
            result = work.run(4**attempt)
        event = backend.record_event(stream)
        action()
        running = not is_done(event)
        backend.synchronize(index)
        assert is_done(event), "synchronize() returned while work was still running"
        assert torch.equal(subject.fetch(result), work.pattern), (
            "the long work itself came out wrong"
        )
        if running:
            return True
        if alone is None:
            alone = max(_seconds(subject, index, action) for _ in range(2))
        if told or _seconds(subject, index, lambda: work.run(4**attempt)) > _LONGER * alone:  # noqa: B023
            told += 1
        if told == _TOLD:
            break
    return told == 0 and tries == _TRIES  # no work was long enough to tell: nothing is held


def _seconds(subject: Subject, index: int, action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    subject.backend.synchronize(index)
    return time.perf_counter() - begin
