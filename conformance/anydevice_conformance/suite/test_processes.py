"""PRO: which device a process uses, and what it needs around it."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from unittest import mock

import pytest
import torch

from anydevice.backend import DeviceBackend
from anydevice_conformance.covering import covering_situations, simpler
from anydevice_conformance.laws import hold_each
from anydevice_conformance.situations import Situation, run_in, state
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread

#: So many threads use the device one after the other.
_THREADS = 6
#: Elements of a thread's own tensor.
_OWN = 4096


def test_PRO_001_set_device(subject: Subject) -> None:
    """After `set_device` a bare device type is that index.

    Found: a tensor made with the bare type is on another index, or `current_device` says so.
    Fix: have `set_device` call what your runtime calls its current device.
    """
    backend = subject.backend
    before, usual = backend.current_device(), torch.get_default_device()
    try:
        for index in [*subject.indices, *subject.indices[:1]]:
            backend.set_device(index)
            assert torch.get_default_device() == usual, "set_device changed torch's default device"
            made = torch.ones(2, device=subject.type)
            assert subject.is_on(made, index), f"after set_device({index}), made on {made.device}"
            bare = subject.backend.move(torch.ones(2), torch.device(subject.type, index))
            assert subject.is_on(bare, index), f"after set_device({index}), moved to {bare.device}"
            said = backend.current_device()
            assert said in (index, None), f"after set_device({index}), current_device() is {said!r}"
            if said is not None:
                assert type(said) is int, f"current_device() returned {said!r}"
    finally:
        if before is not None:
            backend.set_device(before)
    if before is None or len(subject.indices) < 2:
        return
    last = subject.indices[-1]

    def elsewhere() -> tuple[object, torch.device]:
        backend.set_device(last)
        return backend.current_device(), torch.ones(2, device=subject.type).device

    told, place = in_thread(elsewhere)
    assert (told, place.index) == (last, last), f"in a thread, set_device({last}) gave {place}"
    assert backend.current_device() == before, "set_device in a thread changed this thread's device"
    if subject.capabilities.streams:
        stream = backend.new_stream(last)
        with backend.use_stream(stream):
            backend.set_device(subject.indices[0])
            backend.set_device(last)
            assert backend.current_stream(last) == stream, "set_device changed the current stream"
        backend.set_device(before)


def test_PRO_001_nothing_else(subject: Subject) -> None:
    """`set_device` changes the current device of the calling thread, and nothing else.

    Found: a current stream, a default or a mode changed, also where the device was current before.
    Fix: set the runtime's current device only; each device keeps its own current stream.
    """

    def law(situation: Situation) -> None:
        run_in(subject, situation, lambda: _set_each(subject, situation))

    hold_each(subject, covering_situations(subject), law, lambda one: simpler(subject, one))


def _set_each(subject: Subject, situation: Situation) -> None:
    for index in (situation.current, situation.index, situation.index, situation.current):
        before = state(subject)
        subject.backend.set_device(index)
        after = state(subject)
        changed = dataclasses.replace(before, device=after.device).differences(after)
        assert not changed, f"set_device({index}): {changed}"


def test_PRO_002_local_device(subject: Subject) -> None:
    """Each local rank has a device of its own, or an error.

    Found: an index that is not there, one index for two ranks, or no error where none is left.
    Fix: ``return local_rank`` below `device_count`, and raise as the default does above.
    """
    count, before = subject.backend.device_count(), state(subject)
    given = [subject.backend.local_device(rank) for rank in range(count)]
    assert all(type(index) is int and 0 <= index < count for index in given), (
        f"{given} for {count} devices"
    )
    assert len(set(given)) == count, f"ranks share devices: {given}"
    again = {rank: subject.backend.local_device(rank) for rank in reversed(range(count))}
    assert again == dict(enumerate(given)), f"asked in another order, {again} for {given}"
    for other in {0, count - 1, count}:  # as in any launched process; the argument counts
        with mock.patch.dict(os.environ, {"LOCAL_RANK": str(other), "RANK": str(other)}):
            found = [subject.backend.local_device(rank) for rank in range(count)]
        assert found == given, f"with LOCAL_RANK={other} in the environment, {found} for {given}"
    unchanged = before.differences(state(subject))
    assert not unchanged, f"local_device: {unchanged}"
    if not subject.is_host:
        with pytest.raises(ValueError):  # noqa: PT011 - any of the kind
            subject.backend.local_device(-1)
    try:
        more = subject.backend.local_device(count)
    except ValueError:
        return
    assert count == 1, f"rank {count} got device {more}, which another rank has"


def test_PRO_003_numa_node(backend: DeviceBackend, subject: Subject) -> None:
    """`numa_node` is None or a node of this machine, and asking changes nothing.

    Found: another type, a node that is not there, or a thread that runs on fewer processors.
    Fix: return None where the driver gives -1 or nothing; whoever asks binds the process.
    """
    if hasattr(os, "sched_setaffinity"):  # whatever was asked before, on all processors that it may
        in_thread(lambda: _ask_everywhere(subject))
    for index in subject.indices:
        node = backend.numa_node(index)
        if node is None:
            continue
        assert type(node) is int, f"numa_node({index}) returned {node!r}"
        assert node >= 0, f"numa_node({index}) is {node}: None says that it is not known"
        nodes = Path("/sys/devices/system/node")
        assert not nodes.exists() or (nodes / f"node{node}").exists(), f"there is no node {node}"


def _ask_everywhere(subject: Subject) -> None:
    with contextlib.suppress(OSError):  # the system may not allow it
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    before = os.sched_getaffinity(0)
    for index in subject.indices:
        subject.backend.numa_node(index)
        after = os.sched_getaffinity(0)
        assert after == before, f"numa_node({index}) bound the thread to processors {sorted(after)}"


def test_PRO_004_process_environment(backend: DeviceBackend, subject: Subject) -> None:
    """`process_environment` is a mapping of text, and is only an answer.

    Found: another type, an empty text, another answer the second time or in a thread, or a changed
    environment.
    Fix: return a new dict of strings, without what has no value, and leave ``os.environ`` to the
    launcher.
    """
    before = dict(os.environ)
    for size in (*range(1, 10), 16, 64, 1):
        found = backend.process_environment(size)
        assert isinstance(found, Mapping), f"it returned {found!r}"
        for name, value in found.items():
            for text in (name, value):
                if not (isinstance(text, str) and text and "\0" not in text):
                    pytest.fail(f"for {size} processes {name!r}={value!r} is not text")
            assert "=" not in name, f"for {size} processes {name!r} cannot be a variable's name"
        kept = dict(found)
        if isinstance(found, MutableMapping):  # it is the caller's, who adds to it
            found.clear()
        for again in (
            backend.process_environment(size),
            in_thread(lambda: backend.process_environment(size)),  # noqa: B023 - called at once
        ):
            assert dict(again) == kept, f"for {size} processes it answers {again}, not {kept}"
    assert dict(os.environ) == before, "asking changed os.environ"


def test_PRO_005_threads(subject: Subject, index: int) -> None:
    """Threads that used the device and ended leave no memory of tensors behind.

    Found: each thread keeps a workspace, a stream's buffers or a result for ever.
    Fix: free what a thread has when it ends, or give it to the next one.
    """
    device = subject.device(index)
    values = torch.arange(64.0).view(8, 8)

    def work() -> None:
        subject.backend.set_device(index)
        there = subject.put(values, index).requires_grad_()
        layer = torch.nn.functional.linear(there, there, there[0])
        noisy = torch.mm(layer, there) + torch.rand(8, 8, device=device)
        torch.autograd.backward(noisy.softmax(1).sum())
        subject.fetch(there.grad if there.grad is not None else there)
        subject.backend.synchronize(index)

    held = []
    for _ in range(_THREADS):
        with contextlib.suppress(NotImplementedError):  # it lacks an operator, and says so
            in_thread(work)
        gc.collect()
        subject.backend.synchronize(index)
        held.append(subject.allocated(index))
    grown = held[-1] - held[1]  # the first ones may start what is kept for all
    assert grown <= 0, f"{_THREADS - 2} threads that ended left {grown} bytes of tensors"
    for name, last in _last_calls(subject, index).items():
        grown = 0
        for collect in (False, True):  # takes long: only to be sure
            grown = _grown(subject, index, last, collect)
            if grown <= 0:
                break
        assert grown <= 0, f"a thread whose last call was {name} left {grown} bytes of tensors"


def _grown(
    subject: Subject, index: int, last: Callable[[torch.Tensor], object], collect: bool
) -> int:
    """By how many bytes of tensors the last of three threads raised what all devices hold."""
    now = before = 0
    for _ in range(3):
        in_thread(lambda: _use_and(subject, index, last))
        if collect:
            gc.collect()
        subject.synchronize_all()
        before, now = now, sum(subject.allocated(i) for i in subject.indices)
    return now - before


def _last_calls(subject: Subject, index: int) -> dict[str, Callable[[torch.Tensor], object]]:
    """What may be the last that a thread does with a tensor of its own on the device."""
    backend, other = subject.backend, subject.indices[subject.indices.index(index) - 1]
    host = torch.ones(_OWN)
    found: dict[str, Callable[[torch.Tensor], object]] = {
        "a move to the device": lambda t: subject.put(host, index),
        "a non-blocking move to the device": lambda t: subject.put(host, index, non_blocking=True),
        "a move to the host": subject.fetch,
        "a non-blocking move to the host": lambda t: subject.fetch(t, non_blocking=True),
        "a move of a turned tensor to the host": lambda t: subject.fetch(t.view(4, -1).t()),
        "a move to where it is": lambda t: subject.put(t, index),
        "a move to another device": lambda t: subject.put(t, other),
        "a non-blocking move to another device": lambda t: subject.put(t, other, non_blocking=True),
        "memory_info": lambda t: backend.memory_info(index),
        "empty_cache": lambda t: backend.empty_cache(index),
    }
    if subject.capabilities.streams:

        def on_a_stream(tensor: torch.Tensor) -> None:
            with backend.use_stream(backend.new_stream(index)) as stream:
                subject.fetch(tensor * 2, non_blocking=True)
                backend.record_event(stream)

        found["work on a stream of its own"] = on_a_stream
    if subject.capabilities.pinned_memory:
        found["a move of a pinned tensor"] = lambda t: subject.put(
            backend.pin_memory(host), index, non_blocking=True
        )
    if subject.capabilities.device_rng:
        found["rng_state"] = lambda t: backend.rng_state(index)
    return found


def _use_and(subject: Subject, index: int, last: Callable[[torch.Tensor], object]) -> None:
    """Use a tensor of the device, and end with a last call."""
    tensor = torch.ones(_OWN, device=subject.device(index))
    with contextlib.suppress(NotImplementedError):
        last(tensor)
