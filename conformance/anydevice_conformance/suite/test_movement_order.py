"""MOV: order, waiting and threads."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc

import torch

from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import at_once
from anydevice_conformance.traffic import check_traffic
from anydevice_conformance.work import long_work


def test_MOV_014_non_blocking_is_ordered(subject: Subject, index: int) -> None:
    """Work queued after a non-blocking move sees the moved values.

    Found: the device computed with what was there before the copy.
    Fix: queue the copy on the current stream, or have the current stream wait for it.
    """
    sources = {"pageable": torch.arange(500_000.0)}
    if subject.capabilities.pinned_memory:
        sources["pinned"] = subject.backend.pin_memory(sources["pageable"])
    for name, source in sources.items():
        for attempt in range(3):
            moved = source if name == "pinned" or subject.is_host else source.clone()
            there = subject.put(moved, index, non_blocking=True)
            if moved is not source:  # pageable memory is its user's again
                moved.fill_(-1)
            doubled = there * 2
            found = subject.fetch(doubled)
            assert torch.equal(found, source * 2), f"{name} source, attempt {attempt}: stale values"
            del there, doubled  # the next attempt gets this memory, with these values in it
            gc.collect()
            source = source + 1 if name == "pageable" else source


def test_MOV_015_to_the_host_waits(subject: Subject, index: int) -> None:
    """A blocking move to the host returns finished results of the work queued before.

    Found: the host read before the device was done.
    Fix: without ``non_blocking``, wait for the current stream before returning.
    """
    work = long_work(subject, index)
    for _ in range(3):
        found = subject.fetch(work.run() + 1)
        assert torch.equal(found, work.pattern + 1), "the result was not there when move returned"


def test_MOV_016_synchronize_waits(subject: Subject, index: int) -> None:
    """After `synchronize` the result of a non-blocking move to the host is there.

    Found: `synchronize(index)` returned before the queued work was done.
    Fix: wait for all streams of that device; the index matters.
    """
    work = long_work(subject, index)
    for _ in range(3):
        found = subject.fetch(work.run() + 1, non_blocking=True)
        subject.backend.synchronize(index)
        assert torch.equal(found, work.pattern + 1), "synchronize returned before the copy was done"


def test_MOV_019_threads(subject: Subject) -> None:
    """Threads that move, pin and use streams at once get their own values, of every dtype.

    Found: threads disturb each other.
    Fix: keep no state between calls (a shared staging buffer, the current device), or lock it.
    """

    def work(number: int) -> None:
        index = subject.indices[number % len(subject.indices)]
        for turn in range(20):
            count = (200, 20_003, 901, 300_007)[turn % 4 if turn < 6 else turn % 3] + 37 * number
            source = torch.full((count,), float(100 * number + turn))
            there = subject.put(source, index, non_blocking=bool(turn % 2))
            assert subject.is_on(there, index), f"thread {number}: is on {there.device}"
            found = subject.fetch(there + 1)
            assert torch.equal(found, source + 1), f"thread {number}: got another's values"

    at_once(work, 8, subject.backend)
    check_traffic(subject, turns=8 if subject.quick else 60)
