"""How a child uses a device: in a forked process, and from several threads at once."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

__all__ = [
    "MEMBERS",
    "answer",
    "answers_of_each",
    "backend_of",
    "count_at_once",
    "first_use",
    "first_use_in_fork",
    "use_in_fork",
]


def backend_of(device_type: str) -> Any:
    """The backend, asked in the order that the interface promises."""
    from anydevice import registry

    backend = registry.get_backend(device_type)
    backend.device_count()  # first of all, as the interface promises
    with contextlib.suppress(Exception):
        backend.module  # noqa: B018 - imports the package that makes torch know the device
    return backend


def count_at_once(backend: Any) -> list[Any]:
    """What two threads are told, at once and twice, of how many devices there are."""
    together = threading.Barrier(2)
    told: list[Any] = []

    def ask() -> None:
        together.wait(60)
        for _ in range(2):
            try:
                told.append((backend.is_available(), backend.device_count()))
            except Exception as error:  # noqa: BLE001 - reported
                told.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def answers_of_each(backend: Any, backwards: bool = False) -> dict[str, list[str]]:
    """What members say of each device, in text, where the first or the last one is asked first.

    A member that hands out what is next, whoever asks, answers differently than in another order.
    """
    asked: dict[str, Callable[[int], Any]] = {
        "local_device": backend.local_device,
        "numa_node": backend.numa_node,
        "device_name": backend.device_name,
        "process_environment": lambda index: sorted(backend.process_environment(index + 1).items()),
        "memory_info": lambda index: backend.memory_info(index).total,
    }
    found = {}
    for name, ask in asked.items():
        told = []
        indices = range(backend.device_count())
        for index in reversed(indices) if backwards else indices:
            try:
                told.append(repr(ask(index)))
            except Exception as error:  # noqa: BLE001 - other checks say what is wrong with it
                told.append(type(error).__name__)
        found[name] = told[::-1] if backwards else told
    return found


def use_in_fork(device_type: str) -> dict[str, Any]:
    """Use the device in a forked child; how that ended."""
    return _in_fork(lambda: _uses_device(device_type))


def first_use_in_fork(device_type: str) -> list[str]:
    """As `first_use`, in a forked child of a process that has not used the device."""

    def work() -> bool:
        faults = first_use(device_type)["faults"]
        if faults:
            raise AssertionError("\n".join(faults))
        return True

    found = _in_fork(work)
    words = found["words"].rsplit("AssertionError: ", 1)[-1].strip()
    return [] if found["code"] == 0 else words.splitlines() or [f"it ended with {found['code']}"]


def _in_fork(work: Callable[[], bool]) -> dict[str, Any]:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = 0 if work() else 2
        except BaseException:  # noqa: BLE001 - the child must not return to its parent's code
            os.write(writable, traceback.format_exc()[-3000:].encode())
        finally:
            os._exit(code)
    os.close(writable)
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                words = os.read(readable, 1 << 16).decode(errors="replace")
                return {"code": os.waitstatus_to_exitcode(status), "words": words}
            time.sleep(0.02)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        return {"code": "hung", "words": ""}
    finally:
        os.close(readable)


def _uses_device(device_type: str) -> bool:
    import torch

    backend = backend_of(device_type)
    there = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, 0)
    values = torch.arange(8.0)
    result = backend.move(backend.move(values, there) + 1, torch.device("cpu"))
    backend.device_name(0)
    backend.supports_dtype(torch.float32)
    backend.synchronize(0)
    for member in (backend.memory_info, backend.memory_allocated):
        with contextlib.suppress(NotImplementedError):
            member(0)
    if backend.capabilities.device_rng:
        drawn = []
        for _ in range(2):
            backend.manual_seed_all(5)
            drawn.append(backend.move(torch.rand(9, device=there), torch.device("cpu")))
        if not torch.equal(*drawn):
            raise AssertionError("in the forked child a seed does not make numbers repeat")
    if backend.capabilities.streams:
        with backend.use_stream(backend.new_stream(0)) as stream:
            backend.synchronize_event(backend.record_event(stream))
    if backend.capabilities.pinned_memory:
        backend.pin_memory(values)
    return torch.equal(result, values + 1)


def first_use(device_type: str) -> dict[str, Any]:
    """Have eight threads ask each member, all at once, each as if it were the first.

    Afterwards one thread asks again: all must have been told the same.
    """
    together = threading.Barrier(_THREADS)
    faults: list[str] = []
    told: dict[tuple[str, int], Any] = {}

    def use(number: int) -> None:
        for name, ask in MEMBERS.items():
            together.wait(60)
            try:
                told[name, number] = answer(ask, device_type, number)
            except Exception as error:  # noqa: BLE001 - reported
                faults.append(f"thread {number}, {name}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=use, args=(number,)) for number in range(_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (name, number), found in [] if faults else told.items():
        again = answer(MEMBERS[name], device_type, number)
        if again != found:
            faults.append(f"thread {number} was told {found!r} by {name}, and later {again!r}")
    return {"faults": faults}


def answer(ask: Callable[[Any, int, int], Any], device_type: str, number: int) -> Any:
    """What a member says when the thread, or the device, of this number asks."""
    from anydevice import registry

    backend = registry.get_backend(device_type)
    try:
        return ask(backend, number % backend.device_count(), number)
    except NotImplementedError:
        return "no answer"


def _moves(backend: Any, index: int, number: int) -> Any:
    import torch

    there = backend.move(torch.full((50,), float(number)), backend.device(index))
    if backend.move(there + 1, torch.device("cpu")).tolist() != [number + 1.0] * 50:
        raise AssertionError("got another's values")
    return there.device.index or 0


def _dtypes(backend: Any, index: int, number: int) -> Any:
    from anydevice_conformance.data import DTYPES

    return [backend.supports_dtype(dtype) for dtype in DTYPES]


def _streams(backend: Any, index: int, number: int) -> Any:
    import torch

    if not backend.capabilities.streams:
        return None
    with backend.use_stream(backend.new_stream(index)) as stream:
        there = torch.full((9,), 3.0, device=backend.device(index)) * 2
        backend.synchronize_event(backend.record_event(stream))
        return backend.move(there, torch.device("cpu")).tolist()


def _declarations(backend: Any, index: int, number: int) -> Any:
    from anydevice_conformance.subject import DECLARED

    return [getattr(backend, name) for name in DECLARED]


def _memory(backend: Any, index: int, number: int) -> Any:
    found = backend.memory_info(index)
    return [found.total, found.shared_with_host]


def _pins(backend: Any, index: int, number: int) -> Any:
    import torch

    if not backend.capabilities.pinned_memory:
        return None
    pinned = backend.pin_memory(torch.full((9,), float(number)))
    return [pinned.is_pinned(), pinned.tolist()]


def _generator(backend: Any, index: int, number: int) -> Any:
    return backend.rng_state(index).tolist() if backend.capabilities.device_rng else None


_THREADS: Final = 8
#: Each member by name, and how it is asked: of a backend, an index, and a thread's number.
MEMBERS: Final[dict[str, Callable[[Any, int, int], Any]]] = {
    "device_count": lambda backend, index, number: [backend.is_available(), index],
    "capabilities": lambda backend, index, number: vars(backend.capabilities),
    "what is declared": _declarations,
    "device_name": lambda backend, index, number: backend.device_name(index),
    "local_device": lambda backend, index, number: backend.local_device(index),
    "supports_dtype": _dtypes,
    "memory_info": _memory,
    "autocast_dtypes": lambda backend, index, number: sorted(map(str, backend.autocast_dtypes())),
    "numa_node": lambda backend, index, number: backend.numa_node(index),
    "driver_version": lambda backend, index, number: backend.driver_version(),
    "is_out_of_memory": lambda backend, index, number: backend.is_out_of_memory(ValueError()),
    "rng_state": _generator,
    "pin_memory": _pins,
    "move": _moves,
    "streams": _streams,
    "synchronize": lambda backend, index, number: backend.synchronize(index),
}
