"""Questions about waiting and streams."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from anydevice_conformance.probe import Probe
from anydevice_conformance.situations import current_device
from anydevice_conformance.subject import Subject
from anydevice_conformance.watching import Watched

__all__ = ["stream_probes", "waiting_probe"]


def waiting_probe(subject: Subject) -> Probe:
    """The question whether waiting for a device waits for its work."""
    backend, host = Watched(subject), torch.device("cpu")

    def run(index: int) -> None:
        values = torch.arange(2000.0)
        there = values.to(subject.device(index))
        streams = [_stream(subject, index)] if subject.capabilities.streams else []
        found = [(there * 3).to(host, non_blocking=True)]
        for stream in streams:
            event = backend.record_event(backend.current_stream(index))
            backend.wait_event(stream, event)
            with backend.use_stream(stream):
                found.append((there * 3).to(host, non_blocking=True))
        backend.synchronize(index)
        for number, copy in enumerate(found):
            where = "a side stream" if number else "the current stream"
            assert torch.equal(copy, values * 3), f"after synchronize the work of {where} lacks"

    return Probe("synchronize", run, subject.backend.synchronize)


def _stream(subject: Subject, index: int) -> Any:
    """A stream besides those of situations, one for each device."""
    kept: dict[int, Any] = subject.__dict__.setdefault("_probe_streams", {})
    if index not in kept:
        kept[index] = subject.backend.new_stream(index)
    return kept[index]


def stream_probes(subject: Subject) -> Iterator[Probe]:
    """Questions about streams and events."""
    backend, host = Watched(subject), torch.device("cpu")
    turns, shared = itertools.count(), itertools.count()
    usual = {index: backend.current_stream(index) for index in subject.indices}

    def using(index: int) -> None:
        current = {i: backend.current_stream(i) for i in subject.indices}
        _assert_current(subject, current, "before use_stream")
        fresh = [backend.new_stream(index) for _ in range(4)]
        # Drivers hand out streams in turn, so that one of many may be the current one again.
        fresh = [stream for stream in fresh if stream != current[index]]
        assert len(fresh) >= 3, "new streams are the current one"
        assert all(a != b for a, b in itertools.combinations(fresh, 2)), "new streams are equal"
        one, two = fresh[:2]
        with contextlib.suppress(ZeroDivisionError), backend.use_stream(one):
            _assert_current(subject, {**current, index: one}, "inside use_stream")
            with backend.use_stream(two):
                _assert_current(subject, {**current, index: two}, "in a nested use_stream")
                with backend.use_stream(one), backend.use_stream(one):
                    _assert_current(subject, {**current, index: one}, "in a third use_stream")
                _assert_current(subject, {**current, index: two}, "after a third use_stream")
            _assert_current(subject, {**current, index: one}, "after a nested use_stream")
            with backend.use_stream(one):
                pass
            _assert_current(subject, {**current, index: one}, "after its own use_stream in it")
            with backend.use_stream(usual[index]):
                _assert_current(subject, {**current, index: usual[index]}, "in the first stream's")
                assert current_device(subject) in (index, None), (
                    f"inside use_stream of device {index} the current one is another"
                )
            assert current_device(subject) in (index, None), (
                f"inside use_stream of device {index} the current one is another"
            )
            raise ZeroDivisionError
        _assert_current(subject, current, "after use_stream")
        for stream in (usual[index], current[index]):  # from wherever the caller is
            with backend.use_stream(stream):
                _assert_current(subject, {**current, index: stream}, "in a stream of before")
                assert current_device(subject) in (index, None), (
                    f"inside use_stream of device {index} the current one is another"
                )
            _assert_current(subject, current, "after a stream of before")

    def apart(index: int) -> None:
        main, one, other = (subject.backend.new_stream(index) for _ in range(3))
        two = one if next(shared) % 2 else other  # a stream may be used by several threads
        with ThreadPoolExecutor(1) as pool, contextlib.ExitStack() as theirs:
            before = pool.submit(subject.backend.current_stream, index).result()
            with subject.backend.use_stream(main):
                with subject.backend.use_stream(one):
                    pool.submit(theirs.enter_context, subject.backend.use_stream(two)).result()
                found = subject.backend.current_stream(index)
                assert found == main, f"another thread's use_stream changed this one's to {found}"
                inside = pool.submit(subject.backend.current_stream, index).result()
                assert inside == two, f"a thread's stream ended with another's: it is {inside}"
                pool.submit(theirs.close).result()
            after = pool.submit(subject.backend.current_stream, index).result()
            assert after == before, f"a thread's stream was {before}, and is {after}"

    def ordering(index: int) -> None:
        values = torch.arange(1500.0)
        there = values.to(subject.device(index))
        one, two = _stream(subject, index), backend.new_stream(index)
        pairs = ((one, two), (one, usual[index]), (usual[index], two))
        for number, (first, then) in enumerate(pairs):
            factor = 5 + 3 * number + 9 * (next(turns) % 7)  # other values than memory may hold
            _enter(subject, index, first)
            with backend.use_stream(first):
                result = there * factor
            event = backend.record_event(first)
            backend.wait_event(then, event)
            with backend.use_stream(then):
                found = (result + 1).to(host)
            assert torch.equal(found, values * factor + 1), "work did not wait for the event"

    def events(index: int) -> None:
        values = torch.arange(1500.0)
        there = values.to(subject.device(index))
        one, two = _stream(subject, index), backend.new_stream(index)
        _enter(subject, index, one)
        with backend.use_stream(one):
            copy = (there * 7).to(host, non_blocking=True)
        event = backend.record_event(one)
        later = [backend.record_event(two) for _ in range(200)]  # more than a pool has
        backend.synchronize_event(event)
        assert torch.equal(copy, values * 7), "synchronize_event returned before the work was done"
        del later

    def crossing(index: int) -> None:
        other = next((i for i in subject.indices if i != index), None)
        if other is None:
            return
        values = torch.arange(1500.0)
        there = values.to(subject.device(index))
        one, two = _stream(subject, index), _stream(subject, other)
        _enter(subject, index, one)
        with backend.use_stream(one):
            result = there * 9
        backend.wait_event(two, backend.record_event(one))
        with backend.use_stream(two):
            end = backend.record_event(two)
        backend.synchronize_event(end)
        query = getattr(end, "query", None)
        assert query is None or query(), "synchronize_event returned before the event was done"
        assert torch.equal(result.to(host), values * 9), "work on a side stream is wrong"

    def repeat(index: int) -> None:
        stream = _stream(subject, index)
        with subject.backend.use_stream(stream):
            event = subject.backend.record_event(stream)
        subject.backend.wait_event(subject.backend.current_stream(index), event)
        subject.backend.synchronize_event(event)

    def failing(index: int) -> None:
        with subject.backend.use_stream(_stream(subject, index)):
            raise ZeroDivisionError

    yield Probe("new_stream, current_stream and use_stream", using, failing)
    yield Probe("use_stream in two threads", apart)
    yield Probe("record_event and wait_event", ordering, repeat)
    yield Probe("record_event and synchronize_event", events, subject.backend.new_stream)
    yield Probe("wait_event between devices", crossing)


def _enter(subject: Subject, index: int, stream: Any) -> None:
    """Order a stream after what made the values, whichever stream that was on."""
    subject.backend.wait_event(
        stream, subject.backend.record_event(subject.backend.current_stream(index))
    )


def _assert_current(subject: Subject, wanted: dict[int, Any], when: str) -> None:
    for index, stream in wanted.items():
        found = subject.backend.current_stream(index)
        assert found == stream, f"{when} the current stream of device {index} is {found}"
        own = getattr(subject.module, "current_stream", None)
        if own is not None:
            assert own(index) == stream, (
                f"{when} torch queues work of device {index} on {own(index)}"
            )
