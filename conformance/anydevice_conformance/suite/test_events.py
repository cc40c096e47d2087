"""STR: events, and the order that they give."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch

from anydevice_conformance.marks import needs, two_devices
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread
from anydevice_conformance.work import is_done, long_work

pytestmark = needs("streams")
#: So many elements are above the sizes that drivers copy in one piece.
_LARGE = 400_000


@pytest.mark.parametrize(
    "order",
    [
        "new then new",
        "older last",
        "default first",
        "default last",
        "default last, elsewhere",
        "from a thread",
    ],
)
def test_STR_004_wait_for_kernel(subject: Subject, index: int, order: str) -> None:
    """Work after `wait_event` sees the results of the work that the event marks.

    Found: a stream did not wait; it read what was there before.
    Fix: record the event on the stream given, and make the waiting stream wait for it on the
    device.
    """
    backend, work = subject.backend, long_work(subject, index)
    older, newer = backend.new_stream(index), backend.new_stream(index)
    default = backend.current_stream(index)
    first, then = {
        "new then new": (older, newer),
        "older last": (newer, older),
        "default first": (default, newer),
        "default last": (newer, default),
        "default last, elsewhere": (newer, default),
        "from a thread": (older, newer),
    }[order]
    backend.synchronize(index)
    with backend.use_stream(first):
        result = work.run()
    if order.endswith("thread"):
        event = in_thread(lambda: backend.record_event(first))
    else:
        event = backend.record_event(first)
    # Which stream is current where it is asked to wait is no matter.
    elsewhere = backend.use_stream(older) if order.endswith("elsewhere") else nullcontext()
    with elsewhere:
        for other in _pending(subject, index) if order.startswith("new") else ():
            backend.wait_event(then, other)
        backend.wait_event(then, event)
    with backend.use_stream(then):
        found = subject.fetch(result + 1)
    backend.synchronize(index)
    assert torch.equal(found, work.pattern + 1), f"{order}: the waiting stream read too early"


def _pending(subject: Subject, index: int) -> list[Any]:
    """Events of a stream whose work is queued."""
    backend, stream = subject.backend, subject.backend.new_stream(index)
    with backend.use_stream(stream):
        torch.ones(9, device=subject.device(index)).add_(1)
    return [backend.record_event(stream) for _ in range(140)]


def test_STR_005_copy_then_compute(subject: Subject, index: int) -> None:
    """A weight copied on one stream is there for the stream that waits.

    Found: the computing stream read the weight before it had arrived.
    Fix: queue non-blocking copies on the current stream, where `record_event` marks them.
    """
    backend, work = subject.backend, long_work(subject, index)
    for user in (backend.current_stream(index), backend.new_stream(index)):
        source = torch.arange(300_000.0) + (user == backend.current_stream(index))
        if subject.capabilities.pinned_memory:
            source = backend.pin_memory(source)
        side = backend.new_stream(index)
        with backend.use_stream(side):
            busy = work.run()
            there = subject.put(source, index, non_blocking=True)
        backend.wait_event(user, backend.record_event(side))
        with backend.use_stream(user):
            found = subject.fetch(there * 2)
        backend.synchronize(index)
        assert torch.equal(found, source * 2), "the weight was not there"
        del busy, there
        gc.collect()


def test_STR_006_compute_then_copy(subject: Subject, index: int) -> None:
    """A result leaves right on a stream that waits for the one that computes it.

    Found: the copy to the host began before the result was there.
    Fix: as STR-004; the copy belongs to the current stream.
    """
    backend, work = subject.backend, long_work(subject, index)
    compute, copy = backend.new_stream(index), backend.new_stream(index)
    backend.synchronize(index)
    with backend.use_stream(compute):
        result = work.run() + 1
    backend.wait_event(copy, backend.record_event(compute))
    with backend.use_stream(copy):
        found = subject.fetch(result, non_blocking=True)
    backend.synchronize(index)
    assert torch.equal(found, work.pattern + 1), "the result left before it was there"


def test_STR_009_event_marks_the_past(subject: Subject, index: int) -> None:
    """Work queued after `record_event` is not waited for.

    Found: who waits for the event waits for later work, too.
    Fix: record when `record_event` is called, not when somebody waits.
    """
    backend, work = subject.backend, long_work(subject, index)
    busy, other = backend.new_stream(index), backend.new_stream(index)
    small = subject.put(torch.arange(64.0), index)
    backend.synchronize(index)
    early = False
    for attempt in range(6):
        with backend.use_stream(busy):
            first = small + 1
        event = backend.record_event(busy)
        with backend.use_stream(busy):
            result = work.run(2 ** max(0, attempt - 1))
            if subject.capabilities.pinned_memory:
                landed = subject.fetch(result, non_blocking=True)
        end = backend.record_event(busy)
        backend.wait_event(other, event)
        with backend.use_stream(other):
            found = subject.fetch(first + 1)
        finished = is_done(end)
        if subject.capabilities.pinned_memory:  # what is in host memory tells without an event
            finished = finished or torch.equal(landed, work.pattern)
        backend.synchronize(index)
        assert torch.equal(found, torch.arange(64.0) + 2), "the work before the event is not done"
        assert torch.equal(subject.fetch(result), work.pattern), "the later work went wrong"
        if attempt > 0 and not finished:
            early = True
            break
    assert early, "waiting for the event waited for what was queued after it"


def test_STR_011_events_have_many_waiters(subject: Subject, index: int) -> None:
    """An event can be waited for by many streams, again, and after it has passed.

    Found: a later waiter did not wait, failed, or disturbed the others.
    Fix: do not reset or destroy an event when it is waited for.
    """
    backend, work = subject.backend, long_work(subject, index)
    producer = backend.new_stream(index)
    consumers = [backend.new_stream(index) for _ in range(3)]
    # The last one who was told to wait is asked first, so that no other has waited for it.
    for turn, order in enumerate(((2, 1, 0), (0, 2, 1), (1, 0, 2))):
        with backend.use_stream(producer):
            result = work.run()
        event = backend.record_event(producer)
        values = []
        for number, stream in enumerate(consumers):
            backend.wait_event(stream, event)
            if turn:
                backend.wait_event(stream, event)
            with backend.use_stream(stream):
                values.append(result + number)
        for number in order:
            with backend.use_stream(consumers[number]):
                found = subject.fetch(values[number])
            assert torch.equal(found, work.pattern + number), (
                f"turn {turn}: waiter {number} was early"
            )
        backend.synchronize(index)
        assert is_done(event), "the event is not done after synchronize"
        backend.wait_event(consumers[0], event)
        with backend.use_stream(consumers[0]):
            assert torch.equal(subject.fetch(result + 7), work.pattern + 7)


def test_STR_011_events_come_and_go(subject: Subject, index: int) -> None:
    """Each of many short-lived events is waited for, by however many streams.

    Found: of many events, each gone before the next one came, one was not waited for.
    Fix: know an event by itself, not by its address or by a number that comes again.
    """
    backend = subject.backend
    one, two = backend.new_stream(index), backend.new_stream(index)
    others = [backend.new_stream(index) for _ in range(9)]
    base = subject.put(torch.arange(700.0), index)
    # So many at once that those that come later are likely to lie where one of them lay.
    events = [backend.record_event(one) for _ in range(64)]
    for event in events:
        backend.wait_event(two, event)
    backend.synchronize(index)
    del event, events
    kept = [backend.record_event(one) for _ in range(300)]  # those that live on are no others
    for turn in range(60):
        with backend.use_stream(one):
            result = base + turn
        event = backend.record_event(one)
        for other in others[: turn % 10]:
            backend.wait_event(other, event)
        backend.wait_event(two, event)
        del event
        with backend.use_stream(two):
            found = subject.fetch(result * 2)
        assert torch.equal(found, (torch.arange(700.0) + turn) * 2), (
            f"the {turn + 1}th event was not waited for"
        )
    assert len(kept) == 300


@two_devices
def test_STR_013_wait_across_devices(subject: Subject) -> None:
    """A stream of one device can wait for an event of another.

    Found: waiting for another device's event failed, or did not wait.
    Fix: let the driver order the two, or have the host wait where it cannot.
    """
    backend = subject.backend
    pairs = [
        (here, there, first, then)
        for here, there in subject.both_ways()
        for first in (backend.new_stream(here), backend.current_stream(here))
        for then in (backend.new_stream(there), backend.current_stream(there))
    ]
    if subject.quick:  # each stream of both kinds comes first and then
        pairs = [pairs[number] for number in (0, 3, 5, 6)]
    for here, there, first, then in pairs:
        work = long_work(subject, here)
        with backend.use_stream(first):
            result = work.run()
        event = backend.record_event(first)
        backend.wait_event(then, event)
        end = backend.record_event(then)
        backend.synchronize(there)
        assert is_done(end), "synchronize does not wait for a stream that waits"
        assert is_done(event), f"a stream of {there} did not wait for an event of {here}"
        with backend.use_stream(then):
            found = subject.fetch(subject.put(result, there) + 1)
        assert torch.equal(found, work.pattern + 1), "the result between devices is wrong"


def test_STR_016_synchronize_event(subject: Subject, index: int) -> None:
    """After `synchronize_event` the work that the event marks is done.

    Found: the host went on before.
    Fix: wait for the event: ``event.synchronize()``, or the vendor's call.
    """
    backend, work = subject.backend, long_work(subject, index)
    for stream in (backend.new_stream(index), backend.current_stream(index)):
        with backend.use_stream(stream):
            copy = subject.fetch(work.run(), non_blocking=True)
        event = in_thread(partial(backend.record_event, stream))
        backend.synchronize_event(event)
        assert torch.equal(copy, work.pattern), "the result is not there"
        assert is_done(event), "the event is not done"
        backend.synchronize_event(event)  # once more: it has passed, and that is no error
        with backend.use_stream(stream):  # and where it is large
            large = work.run().flatten().repeat(_LARGE // work.pattern.numel() + 1)
            copy = subject.fetch(large, non_blocking=True)
        backend.synchronize_event(backend.record_event(stream))
        assert torch.equal(copy[-work.pattern.numel() :], work.pattern.flatten()), (
            "a large result is not there"
        )
