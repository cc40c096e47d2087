"""DEV: members in every situation, and what they leave behind."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import psutil
import torch

from anydevice_conformance.laws import hold
from anydevice_conformance.members import Probe, probes
from anydevice_conformance.situations import Situation, restored, run_in, situations, state
from anydevice_conformance.subject import Subject


def test_DEV_012_every_member_in_every_situation(subject: Subject) -> None:
    """Each member answers right, and leaves the caller's state as it was, in every situation.

    Found: with another current device, on a side stream, in a thread, under another gradient mode,
    or only now and then, a member answers wrong, raises, or changes what it must leave alone.
    Fix: take the device from the index or tensor that is given, never from what is current; put
    back what has to be set for a call, in a ``finally``; keep no state between calls.
    """
    found = probes(subject)

    def law(example: tuple[Probe, Situation]) -> None:
        probe, situation = example
        with restored(subject):
            run_in(subject, situation, lambda: _run(subject, probe, situation.index))

    hold(subject, st.tuples(st.sampled_from(found), situations(subject)), law, examples=900)


def _run(subject: Subject, probe: Probe, index: int) -> None:
    before = state(subject)
    try:
        probe.run(index)
    except AssertionError:
        raise
    except NotImplementedError:
        if not probe.may_decline:
            raise
    changed = before.differences(state(subject))
    assert not changed, f"{probe}: {changed}"


def test_DEV_013_nothing_is_left(subject: Subject, index: int) -> None:
    """Members called hundreds of times, also when they raise, leave nothing behind.

    Found: each call leaves memory on the device or the host, a file descriptor or a thread.
    Fix: close what a call opens, in a ``finally``; keep no list of what was asked for.
    """
    times = 120 if subject.quick else 400
    calls = [probe for probe in probes(subject) if probe.repeat]
    for probe in calls:
        for _ in range(8):
            _quietly(probe, index)
    for probe in calls:
        before = _holdings(subject)
        for _ in range(times):
            _quietly(probe, index)
        after = _holdings(subject)
        for what, (one, allowed) in before.items():
            grown = after[what][0] - one
            assert grown <= allowed * times, (
                f"{times} times {probe}: {grown} more {what} than before"
            )


def _quietly(probe: Probe, index: int) -> None:
    try:
        if probe.repeat is not None:
            probe.repeat(index)
    except Exception:  # noqa: BLE001 - what is left is the question here, not what is answered
        return


def _holdings(subject: Subject) -> dict[str, tuple[int, float]]:
    """What the process has, and by how much of each a call may raise it on average."""
    subject.synchronize_all()
    gc.collect()
    process = psutil.Process()
    found: dict[str, tuple[int, float]] = {
        "objects": (sys.getallocatedblocks(), 0.5),
        "threads": (threading.active_count(), 0.02),
        "bytes of host memory": (process.memory_info().rss, 16_384.0),
        "tensors": (_tensors(), 0.02),
    }
    if hasattr(process, "num_fds"):
        found["file descriptors"] = (process.num_fds(), 0.02)
    if not subject.is_host:
        for index in subject.indices:
            found[f"bytes on device {index}"] = (_allocated(subject, index), 64.0)
        found["bytes of pinned memory"] = (_pinned(subject), 64.0)
    return found


def _tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def _allocated(subject: Subject, index: int) -> int:
    """By the device's own word, where it has one: the backend's may be what is wrong."""
    readers: list[Callable[[int], Any]] = [subject.backend.memory_allocated]
    own = getattr(subject.module, "memory_allocated", None)
    for read in [own, *readers] if own is not None else readers:
        try:
            return int(read(index))
        except Exception:  # noqa: BLE001 - it does not say: ask the next
            continue
    return 0


def _pinned(subject: Subject) -> int:
    read = getattr(subject.module, "host_memory_stats", None)
    try:
        return int(read()["active_bytes.current"]) if read is not None else 0
    except Exception:  # noqa: BLE001 - it does not say
        return 0
