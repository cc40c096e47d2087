"""STR: a host that no stream operation stops."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anydevice_conformance.marks import needs
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread
from anydevice_conformance.work import still_running

pytestmark = needs("streams")


def _current_of(subject: Subject, stream: Any) -> None:
    with subject.backend.use_stream(stream):
        subject.backend.current_stream(stream.device.index)


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
        "current_stream": lambda: [backend.current_stream(index) for _ in "both"],
        "asking what the backend declares": lambda: (
            backend.capabilities,
            backend.device_count(),
            backend.device(index),
            backend.supports_dtype(torch.float32),
        ),
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
        "current_stream of the busy one",
        "asking what the backend declares",
        "use_stream",
        "record_event",
        "wait_event",
        "queueing a kernel",
        "everything while the current stream is busy",
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
    actions = _host_actions(subject, index)
    current = backend.current_stream(index)
    if action.startswith("everything"):
        busy = current

    def everything() -> None:
        for act in actions.values():
            act()
        event = backend.record_event(current)
        backend.wait_event(idle, event)
        in_thread(lambda: backend.wait_event(idle, event))

    others = {
        "everything while the current stream is busy": everything,
        "current_stream of the busy one": lambda: _current_of(subject, busy),
        "record_event on the busy stream": lambda: backend.record_event(busy),
        "wait_event for the busy stream": lambda: backend.wait_event(
            idle, backend.record_event(busy)
        ),
    }
    act = {**actions, **others}[action]
    assert still_running(subject, index, busy, act), f"{action} stopped the host"
