"""PRO: which device a process uses, and what it needs around it."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch

from anydevice.backend import DeviceBackend
from anydevice_conformance.situations import state
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import in_thread


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
    """`numa_node` is None or a node of this machine.

    Found: another type, or a node that is not there.
    Fix: return None where the driver gives -1 or nothing.
    """
    for index in subject.indices:
        node = backend.numa_node(index)
        if node is None:
            continue
        assert type(node) is int, f"numa_node({index}) returned {node!r}"
        assert node >= 0, f"numa_node({index}) is {node}: None says that it is not known"
        nodes = Path("/sys/devices/system/node")
        assert not nodes.exists() or (nodes / f"node{node}").exists(), f"there is no node {node}"


def test_PRO_004_process_environment(backend: DeviceBackend) -> None:
    """`process_environment` is a mapping of text, and is only an answer.

    Found: another type, another answer the second time, or a changed environment.
    Fix: return a dict of strings, and leave ``os.environ`` to the launcher.
    """
    before = dict(os.environ)
    for size in (1, 2, 8):
        found = backend.process_environment(size)
        assert isinstance(found, Mapping), f"it returned {found!r}"
        for name, value in found.items():
            if not (isinstance(name, str) and name and isinstance(value, str)):
                pytest.fail(f"{name!r}={value!r} is not text")
        assert dict(found) == dict(backend.process_environment(size)), "it answers differently"
    assert dict(os.environ) == before, "asking changed os.environ"
