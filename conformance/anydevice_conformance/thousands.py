"""Members called a thousand times in a row, each answer of which is looked at."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice_conformance.data import DTYPES
from anydevice_conformance.members_memory import memory_of
from anydevice_conformance.situations import state
from anydevice_conformance.subject import Subject

__all__ = ["answers_stay", "work_stays"]

_TIMES: Final = 1010


def answers_stay(subject: Subject) -> None:
    """What is only asked for is the same each time.

    Raises:
        AssertionError: it is not, or a call changed the caller's state.
    """
    for name, ask in _questions(subject).items():
        try:
            first = ask()
        except NotImplementedError:
            continue
        before = state(subject)
        for number in range(2, _TIMES):
            found = ask()
            assert found == first, f"{name} was {first!r}, and the {number}th time {found!r}"
        changed = before.differences(state(subject))
        assert not changed, f"{name}: {changed}"


def _questions(subject: Subject) -> dict[str, Callable[[], Any]]:
    backend, index = subject.backend, subject.indices[-1]
    dtypes = itertools.cycle(DTYPES)
    known = {dtype: backend.supports_dtype(dtype) for dtype in DTYPES}

    def supports() -> bool:
        dtype = next(dtypes)
        return backend.supports_dtype(dtype) is known[dtype]

    found: dict[str, Callable[[], Any]] = {
        "device_count": lambda: (backend.is_available(), backend.device_count()),
        "device_name": lambda: backend.device_name(index),
        "device": lambda: backend.device(index),
        "capabilities": lambda: backend.capabilities,
        "supports_dtype": supports,
        "is_out_of_memory": lambda: backend.is_out_of_memory(RuntimeError("no such layer")),
        "local_device": lambda: backend.local_device(index),
    }
    if memory_of(subject).size:
        found["memory_info"] = lambda: backend.memory_info(index)
        found["memory_allocated"] = lambda: backend.memory_allocated(index)
        found["peak_memory_allocated"] = lambda: backend.peak_memory_allocated(index)
    if subject.capabilities.streams:
        found["current_stream"] = lambda: backend.current_stream(index)
    return found


def work_stays(subject: Subject) -> None:
    """Work that is queued and waited for is done each time, and pinned memory is pinned.

    Raises:
        AssertionError: it is not; the message says which time.
    """
    backend, index = subject.backend, subject.indices[-1]
    values = torch.arange(40.0)
    there = values.to(subject.device(index))
    waits: dict[str, Callable[[], object]] = {"synchronize": lambda: backend.synchronize(index)}
    if subject.capabilities.streams:
        waits["synchronize_event"] = lambda: backend.synchronize_event(
            backend.record_event(backend.current_stream(index))
        )
    for name, wait in waits.items():
        for number in range(1, _waits(subject)):
            copy = subject.fetch(there + number, non_blocking=True)
            wait()
            assert torch.equal(copy, values + number), (
                f"the {number}th time that {name} returned, the work was not done"
            )
    if subject.capabilities.streams:
        _waits_for_events(subject, index, there, values)
    if subject.capabilities.pinned_memory:
        _pins(subject)


def _waits(subject: Subject) -> int:
    """How often work is queued and waited for."""
    return 70 if subject.quick else 510


def _waits_for_events(
    subject: Subject, index: int, there: torch.Tensor, values: torch.Tensor
) -> None:
    """Nothing waits for the first stream but the second one, event by event."""
    backend = subject.backend
    one, two = backend.new_stream(index), backend.new_stream(index)
    backend.synchronize(index)
    for number in range(_waits(subject)):
        with backend.use_stream(one):
            result = there + number
        backend.wait_event(two, backend.record_event(one))
        with backend.use_stream(two):
            found = result * 2
            if number % 2:  # else so many waits are queued
                assert torch.equal(subject.fetch(found), (values + number) * 2), (
                    f"the {number + 1}th event was not waited for"
                )


def _pins(subject: Subject) -> None:
    kept = []
    for number in range(_TIMES):
        pinned = subject.backend.pin_memory(torch.full((9,), float(number)))
        assert pinned.is_pinned(), f"the {number + 1}th tensor is not pinned"
        kept.append(pinned)
    found = torch.stack(kept)
    assert torch.equal(found, torch.arange(float(_TIMES))[:, None].expand(-1, 9)), (
        f"of {_TIMES} pinned tensors that are all kept, one holds another's values"
    )
