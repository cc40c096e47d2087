"""DEV: being found, counted, named."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable

import pytest
import torch

from anydevice import registry
from anydevice.backend import Capabilities, DeviceBackend
from anydevice.backend_check import member_faults
from anydevice_conformance import children
from anydevice_conformance.marks import two_devices
from anydevice_conformance.members import still_probes
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.situations import current_device
from anydevice_conformance.subject import Subject
from anydevice_conformance.threads import at_once


def test_DEV_001_found_by_entry_point(subject: Subject) -> None:
    """The registry has one usable backend for the type, from an entry point of a named package.

    Found: the type is served by torch's default backend, by no named package, or by several.
    Fix: declare ``[project.entry-points."anydevice.backends"]`` in your pyproject.toml; have one
    package installed that claims the type (``anydevice backends`` lists all).
    """
    records = [r for r in registry.list_backends() if r.device_type == subject.type]
    usable = [r for r in records if r.backend is not None]
    assert len(usable) == 1, f"{len(usable)} usable backends for {subject.type!r}: {records}"
    record = usable[0]
    assert record.entry_point != "torch", "torch knows the device; no plugin claims it"
    assert record.distribution not in ("", "unknown"), "the entry point belongs to no package"
    assert record.version, f"package {record.distribution} has no version"
    assert record.status == "available", f"status {record.status}: {record.reason}"


def test_DEV_002_members_well_formed(backend: DeviceBackend) -> None:
    """`device_type`, `priority`, `capabilities` and the two names are of the right kind.

    Found: a declared member has a wrong type, or contradicts another.
    Fix: follow the types in `anydevice.backend.DeviceBackend`; set `collective_backend` only where
    ``Capabilities(collectives=True)``, or have torch know a default for the device type there.
    """
    kind = backend.device_type
    assert isinstance(kind, str), f"device_type is {kind!r}"
    assert kind.isidentifier(), f"device_type {kind!r} is not an identifier"
    assert type(backend.priority) is int, f"priority is {backend.priority!r}"
    assert kind == "cpu" or backend.priority > 0, "an accelerator's priority is above the host's, 0"
    capabilities = backend.capabilities
    assert isinstance(capabilities, Capabilities), f"capabilities is {capabilities!r}"
    for name, value in vars(capabilities).items():
        assert type(value) is bool, f"capability {name} is {value!r}, not a bool"
    words: object = backend.out_of_memory_words
    assert isinstance(words, tuple), f"out_of_memory_words is {words!r}, not a tuple"
    assert all(isinstance(w, str) and w for w in words), f"out_of_memory_words is {words!r}"
    texts = ("collective_backend", "visible_devices_env", "kind", "interface_version")
    for name in (*texts, "torch_package"):
        value = getattr(backend, name)
        assert value is None or (isinstance(value, str) and value), f"{name} is {value!r}"
    claimed, named = capabilities.collectives, backend.collective_backend
    assert claimed or named is None, f"collectives={claimed}, but collective_backend={named!r}"
    if claimed and named is None:
        known = torch.distributed.Backend.default_device_backend_map
        assert kind in known, "collectives are claimed, and no backend name is given"


def test_DEV_003_is_available_agrees(backend: DeviceBackend) -> None:
    """`is_available` is a bool and True exactly when devices are counted.

    Found: another type, an exception, or a count that contradicts it.
    Fix: ``return self.device_count() > 0``, and let `device_count` catch the driver's errors.
    """
    try:
        available, count = backend.is_available(), backend.device_count()
    except Exception as error:  # noqa: BLE001 - the finding itself
        pytest.fail(f"presence raised {type(error).__name__}: {error}")
    assert type(available) is bool, f"is_available() returned {available!r}"
    assert available == (count > 0), f"is_available() is {available}, device_count() is {count}"


def test_DEV_004_each_device_is_there(subject: Subject) -> None:
    """On each index below `device_count` a tensor lives, and says that index.

    Found: the count changes, is no int, or counts a device on which no tensor can be made.
    Fix: count what this process can use, after the visibility variable.
    """
    counts = [subject.backend.device_count() for _ in range(3)]
    assert len(set(counts)) == 1, f"device_count() gave {counts}"
    assert type(counts[0]) is int, f"device_count() returned {counts[0]!r}"
    for index in range(counts[0]):
        tensor = torch.full((4,), float(index + 1), device=subject.device(index))
        assert subject.is_on(tensor, index), f"made for index {index}, is on {tensor.device}"
        assert tensor.cpu().tolist() == [index + 1.0] * 4, f"device {index} does not keep values"


def test_DEV_007_each_device_has_a_name(subject: Subject) -> None:
    """`device_name` is one line of text.

    Found: no string, an empty one, or several lines.
    Fix: return the driver's product name, or ``f"{device_type}:{index}"``.
    """
    for index in subject.indices:
        name = subject.backend.device_name(index)
        assert isinstance(name, str), f"device_name({index}) returned {name!r}"
        assert name.strip(), f"device_name({index}) is empty"
        assert name.isprintable(), f"device_name({index}) is no line that can be shown: {name!r}"
        held = torch.ones(5 << 20, dtype=torch.uint8, device=subject.device(index))
        again = subject.backend.device_name(index)
        assert again == name, f"with a tensor on it device_name({index}) is {again!r}, not {name!r}"
        del held


@two_devices
def test_DEV_008_variable_hides_devices(subject: Subject) -> None:
    """With the visibility variable at "0" a new process sees one device.

    Found: `visible_devices_env` names a variable that hides nothing.
    Fix: name the variable that your driver reads, or leave it None.
    """
    variable = _variable(subject.backend)
    found = children.ask("count", subject.type, {variable: "0"})
    assert found["device_count"] == 1, (
        f"{variable}=0, and device_count() is {found['device_count']}"
    )


@two_devices
def test_DEV_009_current_device_stays(subject: Subject) -> None:
    """No member changes the thread's current device.

    Found: after a call for another device, that one is the current device.
    Fix: use the device's context manager (``with torch.foo.device(index):``) instead of
    ``set_device``.
    """
    before = current_device(subject)
    if before is None:
        not_claimed("the device does not tell which one is current: there is nothing to change")

    def current() -> int | None:
        return current_device(subject)

    other = next(i for i in reversed(subject.indices) if i != before)
    for name, call in _calls(subject, other).items():
        call()
        assert current() == before, (
            f"{name} changed the current device from {before} to {current()}"
        )


def test_DEV_010_members_from_threads(subject: Subject) -> None:
    """Counting, naming, measuring, moving and synchronising work from many threads.

    Found: an exception or a wrong answer when several threads ask at once.
    Fix: keep no state between calls, or guard it with a lock.
    """
    backend, count = subject.backend, subject.backend.device_count()
    names = {index: backend.device_name(index) for index in subject.indices}
    totals = {index: _total(backend, index) for index in subject.indices}
    dtypes = {dtype: backend.supports_dtype(dtype) for dtype in (torch.float32, torch.bfloat16)}
    lack, together = _lack(subject), threading.Barrier(8)
    tells = backend.current_device() is not None and not subject.is_host
    found = still_probes(subject)

    def ask(number: int) -> None:
        index = subject.indices[number % len(subject.indices)]
        if tells:
            backend.set_device(index)
            together.wait(60)
            now = backend.current_device()
            assert now == index, f"a thread made device {index} current, and it is {now}"
            bare = torch.ones(2, device=subject.type)
            assert subject.is_on(bare, index), f"device {index} is current, not {bare.device}"
        for probe in found:
            probe.run(index)
        for _ in range(10):
            assert backend.device_count() == count, "device_count() differs between threads"
            assert backend.device_name(index) == names[index], "device_name gave another's name"
            assert _total(backend, index) == totals[index], "memory_info gave another's numbers"
            for dtype, known in dtypes.items():
                assert backend.supports_dtype(dtype) is known, "supports_dtype differs"
            if lack is not None:
                assert backend.is_out_of_memory(lack) is True, "is_out_of_memory differs"
            tensor = subject.put(torch.full((64,), float(number)), index)
            assert subject.is_on(tensor, index), f"asked for {index}, is on {tensor.device}"
            backend.synchronize(index)
            assert subject.fetch(tensor)[0].item() == number, "a thread got another's values"

    at_once(ask, 8, backend)


def test_DEV_011_no_driver_is_no_crash(subject: Subject) -> None:
    """In a process that sees no device, presence is False and 0, and nothing raises.

    Found: `is_available` or `device_count` raised, or found a device, where all are hidden.
    Fix: catch whatever the driver raises, and return 0.
    """
    variable = _variable(subject.backend)
    found = children.ask("count", subject.type, {variable: "-1"})
    assert found == {"is_available": False, "device_count": 0}, f"{variable}=-1 gave {found}"


def test_DEV_014_no_faulty_member(backend: DeviceBackend) -> None:
    """Each member is one of the interface's, and of its kind.

    Found: a public member that the interface does not know, or one of another kind.
    Fix: see the name that is suggested; give helpers a name that begins with an underscore.
    """
    faults = member_faults(backend)
    assert not faults, "; ".join(faults)
    for name in ("driver_version", "why_unavailable"):
        words: object = getattr(backend, name)()
        assert isinstance(words, str), f"{name}() returned {words!r}"


def _lack(subject: Subject) -> BaseException | None:
    """The device's own error when memory lacks, where it is one that is recognised."""
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device=subject.device(subject.indices[0]))
    except Exception as error:  # noqa: BLE001 - whichever the device raises
        plain = error.with_traceback(None)
        return plain if subject.backend.is_out_of_memory(plain) is True else None
    return None


def _total(backend: DeviceBackend, index: int) -> int | None:
    try:
        return backend.memory_info(index).total
    except NotImplementedError:
        return None


def _variable(backend: DeviceBackend) -> str:
    variable = backend.visible_devices_env
    if variable is None:
        not_claimed("visible_devices_env is None")
    assert re.fullmatch(r"[A-Za-z_]\w*", variable), f"{variable!r} is no environment variable"
    return variable


def _calls(subject: Subject, index: int) -> dict[str, Callable[[], object]]:
    backend, capabilities = subject.backend, subject.capabilities
    tensor = torch.ones(4)

    def quietly(function: Callable[..., object], *args: object) -> Callable[[], object]:
        def call() -> None:
            with contextlib.suppress(NotImplementedError):
                function(*args)

        return call

    calls: dict[str, Callable[[], object]] = {
        name: quietly(getattr(backend, name), index)
        for name in (
            "device_name",
            "memory_info",
            "memory_allocated",
            "empty_cache",
            "synchronize",
            "peak_memory_allocated",
            "reset_peak_memory",
        )
    }
    calls["move to the device"] = lambda: subject.put(tensor, index)
    calls["move to the host"] = lambda: subject.fetch(subject.put(tensor, index))
    if capabilities.pinned_memory:
        calls["pin_memory"] = quietly(backend.pin_memory, tensor)
    if capabilities.device_rng:
        calls["manual_seed_all"] = quietly(backend.manual_seed_all, 0)
        calls["rng_state and set_rng_state"] = lambda: backend.set_rng_state(
            backend.rng_state(index), index
        )
    if capabilities.streams:

        def events() -> None:
            stream = backend.new_stream(index)
            with backend.use_stream(stream):
                pass
            backend.wait_event(backend.current_stream(index), backend.record_event(stream))

        calls["streams and events"] = events
    return calls
