"""What happens to a process while it uses a device: each member answers as it did at first.

A service has no home directory, no terminal, and no working directory once that was removed.
Programs start torch.distributed, change variables of the environment, fork, and make mistakes.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

from anydevice_conformance.child_uses import MEMBERS, answer, backend_of
from anydevice_conformance.process_state import differences_in_process, process_state

__all__ = ["live"]

#: What a login sets, and a service, a container or a job of a scheduler may lack.
_OF_A_SESSION: Final = (
    *("HOME", "USER", "LOGNAME", "USERNAME", "SHELL", "TERM", "LANG", "LC_ALL", "PWD", "OLDPWD"),
    *("DISPLAY", "HOSTNAME", "MAIL", "EDITOR", "TMPDIR", "TZ"),
    *(f"XDG_{name}" for name in ("CACHE_HOME", "CONFIG_HOME", "DATA_HOME", "RUNTIME_DIR")),
)
#: What a runtime may set as it starts.
_STARTED: Final = {"the environment variables", "the search path of modules"}


def live(device_type: str) -> dict[str, Any]:
    """Ask all members of each device, again and again while things happen to this process."""
    backend = backend_of(device_type)
    count, before = backend.device_count(), process_state()
    at_first = _ask(device_type, count)
    changed = set(differences_in_process(before)) - _STARTED
    faults = [
        f"{key} it is {words!r}" for key, words in at_first.items() if key.endswith("new thread")
    ]
    faults += [f"at first: members changed {name}" for name in sorted(changed)]
    for what, happens in _EVENTS.items():
        with happens(backend):
            before = process_state()
            found = [_ask(device_type, count) for _ in range(2)]
            changed = set(differences_in_process(before))
        faults += [f"{what}: {words}" for one in found for words in _compare(at_first, one)]
        faults += [f"{what}: members changed {name}" for name in sorted(changed)]

    def at_exit() -> None:
        late = [f"at the process's end: {w}" for w in _compare(at_first, _ask(device_type, count))]
        print("\n" + json.dumps({"faults": faults + late}), flush=True)

    atexit.register(at_exit)
    return {"faults": [*faults, "the process's end came to nothing"]}


def _ask(device_type: str, count: int) -> dict[str, Any]:
    """What each member says of each device: the main thread is told, and a new one the same."""
    told: dict[str, Any] = {}
    aside: dict[str, Any] = {}

    def ask(told: dict[str, Any]) -> None:
        for index in range(count):
            for name, question in MEMBERS.items():
                key = f"{name} of device {index}"
                try:
                    told[key] = answer(question, device_type, index)
                except Exception as error:  # noqa: BLE001 - reported
                    told[key] = f"{type(error).__name__}: {error}"

    ask(told)
    thread = threading.Thread(target=ask, args=(aside,))
    thread.start()
    thread.join()
    for key, words in aside.items():
        if words != told[key]:
            told[f"{key}, in a new thread"] = words
    return told


def _compare(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    names = dict.fromkeys((*before, *now))
    return [
        f"{name} was {before.get(name)!r}, and is {now.get(name)!r}"
        for name in names
        if before.get(name) != now.get(name)
    ]


# ---------------------------------------------------------------------- what happens


@contextlib.contextmanager
def _nothing(backend: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _no_session(backend: Any) -> Iterator[None]:
    """No home, no name, no terminal, no input, and a working directory that is gone."""
    kept, folder, terminal = os.getcwd(), tempfile.mkdtemp(), os.dup(0)
    streams = mock.patch.multiple(sys, stdin=None, stdout=None, stderr=None)
    with mock.patch.dict(os.environ), streams:
        for name in _OF_A_SESSION:
            os.environ.pop(name, None)
        os.chdir(folder)
        os.rmdir(folder)
        os.close(0)
        try:
            yield
        finally:
            os.dup2(terminal, 0)
            os.close(terminal)
            os.chdir(kept)


@contextlib.contextmanager
def _other_variables(backend: Any) -> Iterator[None]:
    """What launchers set, and the variable that hides devices: too late for this process."""
    late = dict.fromkeys(("LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"), "1")
    late["HOME"] = "/nowhere"
    if backend.visible_devices_env is not None:
        late[backend.visible_devices_env] = "0"
    with mock.patch.dict(os.environ, late):
        yield


@contextlib.contextmanager
def _distributed(backend: Any) -> Iterator[None]:
    """torch.distributed has started, on the host."""
    import torch.distributed as dist

    started = False
    with contextlib.suppress(Exception):  # this torch, or this machine's network, has none
        store: Any = vars(dist)["HashStore"]()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        started = True
    try:
        yield
    finally:
        if started:
            dist.destroy_process_group()


@contextlib.contextmanager
def _forked(backend: Any) -> Iterator[None]:
    """A child has come and gone; it touched nothing."""
    if hasattr(os, "fork"):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    yield


@contextlib.contextmanager
def _mistakes(backend: Any) -> Iterator[None]:
    """Members have been asked for a device that is not there, and for nonsense."""
    import torch

    beyond = backend.device_count()
    calls: list[Callable[[], object]] = [
        lambda: backend.is_out_of_memory(RuntimeError()),
        lambda: backend.local_device(-1),
        lambda: backend.move(torch.ones(1).expand(1 << 46), backend.device(0)),
    ]
    if backend.device_type != "cpu":
        names = ("device_name", "memory_info", "memory_allocated", "numa_node", "synchronize")
        calls += [lambda name=name: getattr(backend, name)(beyond) for name in names]  # type: ignore[misc]
        calls += [
            lambda: backend.move(torch.ones(2), torch.device(backend.device_type, beyond)),
            lambda: backend.set_device(beyond),
        ]
    for call in calls:
        with contextlib.suppress(Exception):
            call()
    yield


@contextlib.contextmanager
def _let_go(backend: Any) -> Iterator[None]:
    """All that was made is gone, and so is what is cached of it."""
    gc.collect()
    for index in range(backend.device_count()):
        backend.synchronize(index)
        backend.empty_cache(index)
    yield


_EVENTS: Final[dict[str, Callable[[Any], contextlib.AbstractContextManager[None]]]] = {
    "asked again": _nothing,
    "without a session": _no_session,
    "with variables that were changed late": _other_variables,
    "while torch.distributed runs": _distributed,
    "after torch.distributed ended": _nothing,
    "after a child": _forked,
    "after wrong calls": _mistakes,
    "after empty_cache": _let_go,
}
