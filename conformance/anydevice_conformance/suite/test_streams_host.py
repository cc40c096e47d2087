"""STR: a host that no stream operation stops."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice_conformance.marks import needs
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread
from anydevice_conformance.work import still_running

pytestmark = needs("streams")

#: Events and copies that are pending at once.
_MANY: Final = 130
#: New streams that may be the same again before a driver has no other.
_TRIES: Final = 100


def test_STR_008_host_goes_on(subject: Subject, index: int) -> None:
    """No stream operation waits for work that is running, however much of it is pending.

    Found: the operation returned only when the work before it was done, or a new stream's work
    came only then.
    Fix: use the driver's asynchronous calls; an event is recorded and waited for on the device;
    a new stream follows no other.
    """
    backend = subject.backend
    for busy in (backend.new_stream(index), backend.current_stream(index)):
        actions = _actions(subject, index, busy)
        for current in (False, True):

            def act(*names: str, busy: Any = busy, current: bool = current) -> None:
                with backend.use_stream(busy) if current else contextlib.nullcontext():
                    for name in names:
                        actions[name]()  # noqa: B023 - of this busy stream

            if still_running(subject, index, busy, lambda: act(*actions)):  # noqa: B023
                continue
            for name in actions:  # which one? Many calls take long: so does the work
                running = still_running(
                    subject,
                    index,
                    busy,
                    lambda name=name: act(name),  # type: ignore[misc]
                )
                assert running, f"{name} stopped the host, or waited for the busy stream's work"


def _another(subject: Subject, index: int, busy: Any) -> Any:
    """A new stream; drivers hand out streams in turn."""
    for _ in range(_TRIES):
        found = subject.backend.new_stream(index)
        if found != busy:
            return found
    raise AssertionError("new_stream gives the busy stream again and again")


def _actions(subject: Subject, index: int, busy: Any) -> dict[str, Callable[[], object]]:
    """Name to what must not stop the host while a stream is busy."""
    backend = subject.backend
    one, two = _another(subject, index, busy), _another(subject, index, busy)
    tensor, values = subject.put(torch.ones(1000), index), torch.arange(1000.0)
    pinned = backend.pin_memory(values) if subject.capabilities.pinned_memory else None
    others = [other for other in subject.indices if other != index]

    def work_on_a_new_stream() -> None:
        with backend.use_stream(_another(subject, index, busy)):
            found = subject.fetch(subject.put(values, index) + 1)
        assert torch.equal(found, values + 1), "the work on a new stream is wrong"

    def use(stream: Any) -> None:
        with backend.use_stream(stream):
            backend.current_stream(index)

    def queue(stream: Any) -> None:
        with backend.use_stream(stream):
            tensor.add_(1)

    def many_events() -> None:
        events = [backend.record_event(busy) for _ in range(_MANY)]
        for event in events[::10]:
            backend.wait_event(two, event)
            backend.wait_event(busy, event)

    def copies() -> None:
        if pinned is not None:
            with backend.use_stream(busy):
                for first in range(20):
                    subject.put(pinned[first:], index, non_blocking=True)

    def wait_in_a_thread() -> None:
        event = backend.record_event(busy)
        in_thread(lambda: backend.wait_event(two, event))

    def elsewhere() -> None:
        for other in others:
            backend.synchronize(other)
            backend.wait_event(backend.current_stream(other), backend.record_event(two))

    return {
        "new_stream": lambda: backend.new_stream(index),
        "work on a new stream": work_on_a_new_stream,
        "current_stream": lambda: [backend.current_stream(index) for _ in "both"],
        "asking what the backend declares": lambda: (
            backend.capabilities,
            backend.device_count(),
            backend.device(index),
            backend.supports_dtype(torch.float32),
        ),
        "use_stream": lambda: use(one),
        "use_stream of the busy stream": lambda: use(busy),
        "record_event": lambda: backend.record_event(one),
        "an event of an idle stream": lambda: backend.synchronize_event(backend.record_event(one)),
        "queueing a kernel on the busy stream": lambda: queue(busy),
        f"{_MANY} pending events, and waits for them": many_events,
        "copies from parts of pinned memory": copies,
        "wait_event in a thread": wait_in_a_thread,
        "waiting for another device": elsewhere,
        "wait_event": lambda: backend.wait_event(busy, backend.record_event(one)),
    }
