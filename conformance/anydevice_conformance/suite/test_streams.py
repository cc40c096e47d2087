"""STR: streams, current ones, and overlap."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
import threading
from asyncio import CancelledError
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from anydevice_conformance.marks import needs, two_devices
from anydevice_conformance.stream_ways import made_current_by_torch
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import at_once, in_thread
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
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:

        def made(number: int) -> Any:
            if number % 3 == 0:
                return backend.new_stream(index)
            return (one, other)[number % 3 - 1].submit(backend.new_stream, index).result()

        for turn in range(4):
            later = [made(number) for number in range(8)]
            assert all(a != b for n, a in enumerate(later) for b in later[:n]), (
                "two of eight streams, made one after the other in three threads, are equal"
            )
            for number in range(40 * turn):  # drivers may hand out those of a large pool again
                made(number % 7)
    fresh = backend.new_stream(index)
    with backend.use_stream(fresh):
        assert backend.new_stream(index) != fresh, "a new stream is the current one"


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
    for number, error in enumerate(_errors()):
        arguments, cause = error.args, error.__cause__
        try:
            with backend.use_stream((one, before, two)[number % 3]):
                raise error
        except BaseException as found:  # noqa: BLE001 - of any kind
            came = found
        else:
            pytest.fail(f"use_stream keeps {error!r} from the caller")
        assert came is error, f"use_stream makes {came!r} of {error!r}"
        assert (error.args, error.__cause__) == (arguments, cause), "use_stream changes errors"
        assert backend.current_stream(index) == before, f"after {error!r} the old stream is lost"
    context = backend.use_stream(one)
    assert backend.current_stream(index) == before, "use_stream counts before it is entered"
    with backend.use_stream(two):
        with context:
            assert backend.current_stream(index) == one, "the stream is not current inside"
        assert backend.current_stream(index) == two, (
            "the stream of when use_stream was called comes back, not that of when it was entered"
        )
    with backend.use_stream(one), backend.use_stream(one):
        pass
    assert backend.current_stream(index) == before, "a stream used twice does not come off"


class _OfTwo(Exception):  # noqa: N818 - as a user's may be named
    """Cannot be made from one argument."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one, two)


def _errors() -> list[BaseException]:
    """What leaves a context: each kind that a wrapper might treat in its own way."""
    kinds = (ZeroDivisionError, KeyError, RuntimeError, ValueError, TypeError, AttributeError)
    ends = (StopIteration, StopAsyncIteration, GeneratorExit, KeyboardInterrupt, SystemExit)
    device = (torch.OutOfMemoryError, NotImplementedError, MemoryError, TimeoutError, OSError)
    found = [kind("of the caller") for kind in (*kinds, *ends, *device, CancelledError)]
    caused = RuntimeError("of the caller")
    caused.__cause__ = ValueError("its cause")
    return [*found, caused, _OfTwo(1, 2), UnicodeDecodeError("utf-8", b"x", 0, 1, "bad")]


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
    others = in_thread(lambda: backend.current_stream(index))
    with made_current_by_torch(subject, stream):
        assert backend.current_stream(index) == stream, "what torch made current is not seen"
        with backend.use_stream(before):
            assert backend.current_stream(index) == before, "the stream is not current inside"
        assert backend.current_stream(index) == stream, "what torch made current does not come back"
        assert in_thread(lambda: backend.current_stream(index)) == others, (
            "another thread's stream became this thread's"
        )
    assert backend.current_stream(index) == before, "the stream is still the current one"


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
                backend.record_event(free)
                found = subject.fetch(subject.put(small, index) + 1)
            assert torch.equal(found, small + 1), "the short work is wrong"

        assert still_running(subject, index, busy, short), (
            "the short work of one stream came only after the long work of another"
        )


def test_STR_010_synchronize_all_streams(subject: Subject, index: int) -> None:
    """After `synchronize` the work of every stream of the device is done.

    Found: a stream was still running.
    Fix: synchronise the device, not the current stream.
    """
    backend, work = subject.backend, long_work(subject, index)
    streams = [backend.new_stream(index) for _ in range(3)] + [backend.current_stream(index)]
    for _ in range(1 if subject.quick else 2):
        events, copies = [], []
        for stream in streams:
            with backend.use_stream(stream):
                copies.append(subject.fetch(work.run(), non_blocking=True))
            events.append(backend.record_event(stream))
        backend.synchronize(index)
        for number, copy in enumerate(copies):
            assert torch.equal(copy, work.pattern), f"stream {number}'s result is not there"
        assert all(is_done(event) for event in events), "an event of a stream is not done"


@two_devices
def test_STR_012_stream_of_the_device(subject: Subject) -> None:
    """A stream belongs to the device that was asked for.

    Found: `new_stream(index)` or `current_stream(index)` ignored the index.
    Fix: make the stream on ``torch.device(type, index)``.
    """
    backend = subject.backend
    for here, there in subject.both_ways():
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
