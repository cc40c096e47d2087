"""Each call of a member while a check runs: what holds of every call, whatever the check is about.

A check calls members for its own purpose, in orders and situations of its own: while the device is
full, beside other threads, within a group of processes. Here each such call is held to what no call
may change (DEV-012), and its answer to what each answer must be.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from anydevice.backend import DeviceBackend
from anydevice_conformance.monitor_answers import changed_declaration, wrong_answer
from anydevice_conformance.process_state import differences_in_process, process_state
from anydevice_conformance.situations import State, state
from anydevice_conformance.subject import Subject

__all__ = ["monitored"]

#: The state is compared at so many calls of a member in each check, then at one of each 32.
_EACH: Final = 4
_NOT_EVERY: Final = 32
#: What belongs to the process is compared at so many of them.
_WHOLE: Final = 1
#: How many faults of one check are kept.
_MOST: Final = 20
_MEMBERS: Final = sorted(
    name
    for name, member in vars(DeviceBackend).items()
    if inspect.isfunction(member) and not name.startswith("_") and name != "device"
)


@contextlib.contextmanager
def monitored(subject: Subject) -> Iterator[list[str]]:
    """Watch the calls of the backend's members meanwhile; gives what was wrong with them so far.

    Calls in all threads are watched. What a member calls of itself is not.
    """
    monitor, own = _Monitor(subject), vars(subject.backend)
    with subject.replacing({name: monitor.watched(name, own.get(name)) for name in _MEMBERS}):
        yield monitor.faults


class _Here(threading.local):
    inside = False


class _Monitor:
    def __init__(self, subject: Subject) -> None:
        self.faults: list[str] = []
        self._subject = subject
        self._here = _Here()
        self._calls: Counter[str] = Counter()
        self._callers: set[threading.Thread] = set()

    def watched(self, name: str, own: Callable[..., Any] | None) -> Callable[..., Any]:
        """The member ``name``, watched."""
        backend = self._subject.backend
        kind = type(backend)

        @functools.wraps(getattr(kind, name))
        def member(*args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: a check may change the class meanwhile.
            call = own or getattr(kind, name).__get__(backend, kind)
            if self._here.inside:
                return call(*args, **kwargs)
            if name == "use_stream":
                return self._use_stream(call(*args, **kwargs))
            return self._call(name, call, args, kwargs)

        return member

    def _call(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self._calls[name] += 1
        number = self._calls[name]
        if number <= _EACH or number % _NOT_EVERY == 0:
            with self._held(name, number <= _WHOLE):
                answer = self._inside(call, *args, **kwargs)
            self._note(name, changed_declaration(self._subject))
        else:
            answer = self._inside(call, *args, **kwargs)
        self._note(name, wrong_answer(self._subject, name, answer, args, kwargs))
        return answer

    def _inside(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._here.inside = True
        try:
            return call(*args, **kwargs)
        finally:
            self._here.inside = False

    @contextlib.contextmanager
    def _use_stream(self, context: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
        """The context leaves what it found; what is done inside it is not the member's."""
        before = self._state()
        with context as found:
            yield found
        after = self._state()
        if before is not None and after is not None and before.streams != after.streams:
            self._note("use_stream", f"the current streams were {before.streams}: {after.streams}")

    @contextlib.contextmanager
    def _held(self, name: str, whole: bool) -> Iterator[None]:
        """A call, after which the state must be what it was; the process's too if ``whole``."""
        alone = self._alone()
        before = self._state()
        process = process_state() if alone and whole else None
        try:
            yield
        finally:
            if process is not None:
                changed = differences_in_process(process)
                self._note(name, f"it changed {', '.join(changed)}" if changed else "")
            after = self._state()
            if before is not None and after is not None:
                self._note(name, before.differences(_like(before, after, name, alone)))

    def _state(self) -> State | None:
        """The state of the thread; None where it cannot be told (a check of its own says so)."""
        inside, self._here.inside = self._here.inside, True
        try:
            return state(self._subject)
        except Exception:  # noqa: BLE001 - as above
            return None
        finally:
            self._here.inside = inside

    def _alone(self) -> bool:
        """Whether no other thread that called a member lives: it may change what threads share."""
        here = threading.current_thread()
        self._callers.add(here)
        if len(self._callers) > 1:
            self._callers = {thread for thread in self._callers if thread.is_alive()}
        return len(self._callers) == 1

    def _note(self, name: str, wrong: str) -> None:
        fault = f"{name}: {wrong}"
        if wrong and fault not in self.faults and len(self.faults) < _MOST:
            self.faults.append(fault)


def _like(before: State, after: State, name: str, alone: bool) -> State:
    """``after``, without what the call may change, and without what other threads may."""
    spared: dict[str, Any] = {}
    if name == "set_device":
        spared["device"] = before.device
    if not alone:
        for shared in ("dtype", "threads", "generator", "deterministic"):
            spared[shared] = getattr(before, shared)
    return dataclasses.replace(after, **spared)
