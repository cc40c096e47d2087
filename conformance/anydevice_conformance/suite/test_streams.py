"""STR: queues, events, overlap."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from anydevice_conformance.marks import needs, two_devices
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import at_once
from anydevice_conformance.work import is_done, long_work, still_running

pytestmark = needs("streams")


def test_STR_001_new_stream(subject: Subject, index: int) -> None:
    """A new stream is neither the current one nor any other.

    Found: `new_stream` gave the current stream, or one that was given before.
    Fix: make a stream: ``torch.Stream(device=...)``, or the vendor's class.
    """
    backend = subject.backend
    current = backend.current_stream(index)
    streams = [backend.new_stream(index) for _ in range(4)]
    for number, stream in enumerate(streams):
        assert stream is not None, "new_stream returned None"
        assert stream != current, "the new stream equals the current one"
        assert all(stream != other for other in streams[:number]), "two new streams are equal"


def test_STR_002_use_stream(subject: Subject, index: int) -> None:
    """Inside `use_stream` the stream is current; afterwards the old one is, whatever happened.

    Found: the stream was not current inside, or stayed current afterwards.
    Fix: set it on entry, put the old one back on exit, in a ``finally``.
    """
    backend = subject.backend
    before = backend.current_stream(index)
    one, two = backend.new_stream(index), backend.new_stream(index)
    with backend.use_stream(one):
        assert backend.current_stream(index) == one, "the stream is not current inside"
        with backend.use_stream(two):
            assert backend.current_stream(index) == two, "a nested stream is not current"
        assert backend.current_stream(index) == one, "after a nested use the outer one is lost"
    assert backend.current_stream(index) == before, "the old stream did not come back"
    with pytest.raises(ZeroDivisionError), backend.use_stream(one):
        raise ZeroDivisionError
    assert backend.current_stream(index) == before, "after an exception the old stream is lost"
    with backend.use_stream(one), backend.use_stream(one):
        pass
    assert backend.current_stream(index) == before, "a stream used twice does not come off"


def test_STR_003_streams_are_the_threads(subject: Subject, index: int) -> None:
    """A stream used in one thread is not another's current one.

    Found: a thread's `use_stream` changed another thread's current stream.
    Fix: keep the current stream per thread.
    """
    backend = subject.backend
    before, stream = backend.current_stream(index), backend.new_stream(index)
    inside, seen, done = threading.Event(), threading.Event(), []

    def use() -> None:
        with backend.use_stream(stream):
            inside.set()
            seen.wait(30)
            done.append(backend.current_stream(index) == stream)

    thread = threading.Thread(target=use)
    thread.start()
    try:
        assert inside.wait(30), "use_stream failed in a thread"
        mine = backend.current_stream(index)
    finally:
        seen.set()
        thread.join()
    assert mine == before, "another thread's stream became this thread's"
    assert done == [True], "the thread's own stream was not current in it"

    def use_own(number: int) -> None:
        own = backend.new_stream(index)
        for turn in range(10):
            with backend.use_stream(own):
                assert backend.current_stream(index) == own, f"thread {number} lost its stream"
                value = subject.put(torch.full((50,), float(number)), index, non_blocking=True)
                found = subject.fetch(value + turn)
            assert backend.current_stream(index) != own, f"thread {number} kept its stream"
            assert found[0].item() == number + turn, f"thread {number} got another's values"

    at_once(use_own, 6, backend)


@pytest.mark.parametrize("order", ["new then new", "older last", "default first", "default last"])
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
    }[order]
    backend.synchronize(index)
    with backend.use_stream(first):
        result = work.run()
    event = backend.record_event(first)
    backend.wait_event(then, event)
    with backend.use_stream(then):
        found = subject.fetch(result + 1)
    backend.synchronize(index)
    assert torch.equal(found, work.pattern + 1), f"{order}: the waiting stream read too early"


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


def test_STR_007_streams_are_apart(subject: Subject, index: int) -> None:
    """Waiting for one stream's work does not wait for another's.

    Found: when the short work of one stream was done, the long work of another was done, too.
    Fix: give each stream a queue of its own; do not synchronise the device in `move`.
    """
    backend = subject.backend
    for busy, free in (
        (backend.new_stream(index), backend.new_stream(index)),
        (backend.current_stream(index), backend.new_stream(index)),
        (backend.new_stream(index), backend.current_stream(index)),
    ):
        small = torch.arange(64.0)

        def short(free: object = free, small: torch.Tensor = small) -> None:
            with backend.use_stream(free):
                found = subject.fetch(subject.put(small, index) + 1)
            assert torch.equal(found, small + 1), "the short work is wrong"

        assert still_running(subject, index, busy, short), (
            "the short work of one stream came only after the long work of another"
        )


def _host_actions(subject: Subject, index: int) -> dict[str, Callable[[], object]]:
    backend = subject.backend
    one, two = backend.new_stream(index), backend.new_stream(index)
    tensor = subject.put(torch.ones(1000), index)
    busy = backend.new_stream(index)

    def use() -> None:
        with backend.use_stream(two):
            pass

    def queue() -> None:
        with backend.use_stream(two):
            tensor.add_(1)

    return {
        "new_stream": lambda: backend.new_stream(index),
        "current_stream": lambda: backend.current_stream(index),
        "use_stream": use,
        "record_event": lambda: backend.record_event(one),
        "wait_event": lambda: backend.wait_event(two, backend.record_event(busy)),
        "queueing a kernel": queue,
    }


@pytest.mark.parametrize(
    "action",
    [
        "new_stream",
        "current_stream",
        "use_stream",
        "record_event",
        "wait_event",
        "queueing a kernel",
        "record_event on the busy stream",
        "wait_event for the busy stream",
    ],
)
def test_STR_008_host_goes_on(subject: Subject, index: int, action: str) -> None:
    """No stream operation waits for work that is running.

    Found: the operation returned only when the work before it was done.
    Fix: use the driver's asynchronous calls; an event is recorded and waited for on the device.
    """
    backend = subject.backend
    busy, idle = backend.new_stream(index), backend.new_stream(index)
    actions = _host_actions(subject, index) | {
        "record_event on the busy stream": lambda: backend.record_event(busy),
        "wait_event for the busy stream": lambda: backend.wait_event(
            idle, backend.record_event(busy)
        ),
    }
    assert still_running(subject, index, busy, actions[action]), f"{action} stopped the host"


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
    for attempt in range(5):
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


def test_STR_010_synchronize_all_streams(subject: Subject, index: int) -> None:
    """After `synchronize` the work of every stream of the device is done.

    Found: a stream was still running.
    Fix: synchronise the device, not the current stream.
    """
    backend, work = subject.backend, long_work(subject, index)
    streams = [backend.new_stream(index) for _ in range(3)] + [backend.current_stream(index)]
    for _ in range(2):
        events, copies = [], []
        for stream in streams:
            with backend.use_stream(stream):
                copies.append(subject.fetch(work.run(), non_blocking=True))
            events.append(backend.record_event(stream))
        backend.synchronize(index)
        for number, copy in enumerate(copies):
            assert torch.equal(copy, work.pattern), f"stream {number}'s result is not there"
        assert all(is_done(event) for event in events), "an event of a stream is not done"


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


@two_devices
def test_STR_012_stream_of_the_device(subject: Subject) -> None:
    """A stream belongs to the device that was asked for.

    Found: `new_stream(index)` or `current_stream(index)` ignored the index.
    Fix: make the stream on ``torch.device(type, index)``.
    """
    backend = subject.backend
    for here, there in (subject.pair(), subject.pair()[::-1]):
        before, stream = backend.current_stream(here), backend.new_stream(there)
        assert backend.current_stream(here) != backend.current_stream(there), (
            "two devices have one current stream"
        )
        work = long_work(subject, there)
        with backend.use_stream(stream):
            assert backend.current_stream(there) == stream, f"not the current one of {there}"
            assert backend.current_stream(here) == before, f"it is also the current one of {here}"
            result = work.run() + 1
        event = backend.record_event(stream)
        backend.synchronize(there)
        assert is_done(event), f"synchronize({there}) does not wait for a stream of {there}"
        assert torch.equal(subject.fetch(result), work.pattern + 1)


@two_devices
def test_STR_013_wait_across_devices(subject: Subject) -> None:
    """A stream of one device can wait for an event of another.

    Found: waiting for another device's event failed, or did not wait.
    Fix: let the driver order the two, or have the host wait where it cannot.
    """
    backend = subject.backend
    for here, there in (subject.pair(), subject.pair()[::-1]):
        work = long_work(subject, here)
        first, then = backend.new_stream(here), backend.new_stream(there)
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


@needs("pinned_memory")
def test_STR_014_copies_overlap(subject: Subject, index: int) -> None:
    """A copy from pinned memory is done while another stream computes.

    Found: the copy came only after the computation.
    Fix: use the copy engine on the stream that is current; do not fall back to a blocking copy.
    """
    backend = subject.backend
    source = backend.pin_memory(torch.arange(100_000.0))
    compute, copy = backend.new_stream(index), backend.new_stream(index)

    def transfer() -> None:
        with backend.use_stream(copy):
            there = subject.put(source, index, non_blocking=True)
            last = subject.fetch(there[-1:])
        assert last.item() == 99_999.0, "the copy is wrong"

    assert still_running(subject, index, compute, transfer), (
        "the copy came only after the other stream's computation"
    )


def test_STR_015_plentiful(subject: Subject, index: int) -> None:
    """Hundreds of streams and thousands of events work, and keep no device memory.

    Found: they run out, or each keeps memory of the device.
    Fix: take streams from a pool; destroy events with their objects.
    """
    backend = subject.backend

    def use(streams: int, events: int) -> None:
        current = backend.current_stream(index)
        for _ in range(streams):
            stream = backend.new_stream(index)
            for _ in range(events):
                backend.wait_event(current, backend.record_event(stream))
        backend.synchronize(index)
        gc.collect()

    use(4, 2)
    try:
        before = backend.memory_allocated(index)
    except NotImplementedError:
        before = None
    use(200, 10)
    if before is not None:
        assert backend.memory_allocated(index) - before < 1 << 20, "device memory was kept"
    found = subject.fetch(subject.put(torch.ones(3), index) + 1)
    assert found.tolist() == [2.0] * 3


def test_STR_016_synchronize_event(subject: Subject, index: int) -> None:
    """After `synchronize_event` the work that the event marks is done.

    Found: the host went on before.
    Fix: wait for the event: ``event.synchronize()``, or the vendor's call.
    """
    backend, work = subject.backend, long_work(subject, index)
    for stream in (backend.new_stream(index), backend.current_stream(index)):
        with backend.use_stream(stream):
            copy = subject.fetch(work.run(), non_blocking=True)
        event = backend.record_event(stream)
        backend.synchronize_event(event)
        assert torch.equal(copy, work.pattern), "the result is not there"
        assert is_done(event), "the event is not done"
        backend.synchronize_event(event)  # once more: it has passed, and that is no error
