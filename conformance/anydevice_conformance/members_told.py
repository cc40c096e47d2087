"""Questions about what is only told: presence, names, dtypes, and what is current."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Final

import torch

from anydevice_conformance.monitor_answers import changed_declaration
from anydevice_conformance.probe import Probe
from anydevice_conformance.situations import state, surroundings
from anydevice_conformance.subject import Subject
from anydevice_conformance.watching import Watched

__all__ = ["EVERY_DTYPE", "told_probes"]

#: All that torch has; a backend says of each whether the device has it.
EVERY_DTYPE: Final = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str
)


def told_probes(subject: Subject) -> Iterator[Probe]:
    """What takes no memory and changes nothing."""
    yield _presence(subject)
    yield _answers(subject)
    if not subject.is_host:
        yield _current_device(subject)
    yield _dtypes(subject)


def _presence(subject: Subject) -> Probe:
    backend = Watched(subject)
    names = {index: backend.device_name(index) for index in subject.indices}
    count = len(subject.indices)

    def run(index: int) -> None:
        changed = changed_declaration(subject)
        assert not changed, changed
        found: Any = backend.device_count()
        assert type(found) is int, f"device_count() returned {found!r}"
        assert found == count, f"device_count() was {count}, and is {found}"
        available: Any = backend.is_available()
        assert available is True, f"is_available() is {available!r} with {count} devices"
        name: Any = backend.device_name(index)
        assert isinstance(name, str), f"device_name({index}) returned {name!r}"
        assert name == names[index], f"device_name({index}) was {names[index]!r}, and is {name!r}"

    def repeat(index: int) -> None:
        subject.backend.is_available()
        subject.backend.device_count()
        subject.backend.device_name(index)

    return Probe("is_available, device_count and device_name", run, repeat, still=True)


def _answers(subject: Subject) -> Probe:
    """What is only told: the same each time, and nothing changes by it."""
    backend = Watched(subject)
    asked: dict[str, Callable[[int], Any]] = {
        "device": backend.device,
        "local_device": backend.local_device,
        "numa_node": backend.numa_node,
        "process_environment": lambda index: dict(backend.process_environment(2)),
        "autocast_dtypes": lambda index: backend.autocast_dtypes(),
        "driver_version": lambda index: backend.driver_version(),
        "why_unavailable": lambda index: type(backend.why_unavailable()),
        "module": lambda index: _module(subject),
    }
    told = {(name, i): ask(i) for name, ask in asked.items() for i in subject.indices}

    def run(index: int) -> None:
        for name, ask in asked.items():
            found = ask(index)
            assert found == told[name, index], f"{name} was {told[name, index]!r}, and is {found!r}"
        for name in ("driver_version", "why_unavailable"):
            words: Any = getattr(backend, name)()
            assert isinstance(words, str), f"DEV-014: {name}() returned {words!r}"
        node: Any = told["numa_node", index]
        assert node is None or type(node) is int, f"numa_node({index}) returned {node!r}"
        rank: Any = told["local_device", index]
        assert type(rank) is int, f"local_device({index}) returned {rank!r}"
        environment = dict(os.environ)
        answer = backend.process_environment(4)
        if isinstance(answer, MutableMapping):  # it is its caller's
            kept = dict(answer)
            answer["LOCAL_RANK"] = "3"
            again = dict(backend.process_environment(4))
            assert again == kept, f"process_environment was {kept}, and is {again}: a caller's"
        assert dict(os.environ) == environment, "process_environment changed the environment"

    def repeat(index: int) -> None:
        subject.backend.local_device(index)
        subject.backend.numa_node(index)
        subject.backend.process_environment(2)
        subject.backend.autocast_dtypes()
        subject.backend.driver_version()
        subject.backend.why_unavailable()
        subject.backend.device(index)

    return Probe("what is told of devices and processes", run, repeat, still=True)


def _current_device(subject: Subject) -> Probe:
    """What is current can be asked and set, and nothing else changes by it."""
    backend = subject.backend

    def run(index: int) -> None:
        before = state(subject)
        told = backend.current_device()
        assert told in (before.device, None), (
            f"current_device() is {told!r}, and the current device is {before.device}"
        )
        if told is None:
            return
        assert type(told) is int, f"current_device() returned {told!r}"
        for one in (index, index, told):
            backend.set_device(one)
            now = state(subject)
            assert (now.device, backend.current_device()) == (one, one), (
                f"set_device({one}) made device {now.device} the current one"
            )
            changed = dataclasses.replace(before, device=one).differences(now)
            assert not changed, f"set_device({one}): {changed}"

    return Probe(
        "set_device and current_device", run, lambda i: backend.current_device(), still=True
    )


def _dtypes(subject: Subject) -> Probe:
    backend = subject.backend
    known = {dtype: backend.supports_dtype(dtype) for dtype in EVERY_DTYPE}
    dtypes = itertools.cycle(EVERY_DTYPE)

    def run(index: int) -> None:
        with surroundings(subject):
            answers: dict[torch.dtype, Any] = {d: backend.supports_dtype(d) for d in EVERY_DTYPE}
        for dtype, found in answers.items():
            assert type(found) is bool, f"supports_dtype({dtype}) returned {found!r}"
            assert found is known[dtype], f"supports_dtype({dtype}) was {known[dtype]}, is {found}"

    def repeat(index: int) -> None:
        subject.backend.supports_dtype(next(dtypes))

    return Probe("supports_dtype", run, repeat, still=True)


def _module(subject: Subject) -> object:
    """The device's module; None where there is none."""
    with contextlib.suppress(Exception):
        return subject.backend.module
    return None
