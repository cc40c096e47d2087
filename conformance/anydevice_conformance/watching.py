"""A backend each of whose calls is held to leave the caller's state as it was.

Held after each call, not after a whole check: what two calls change may cancel out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from anydevice_conformance.situations import State, state, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["Watched"]


class Watched:
    """Has the members of the subject's backend; a call that changes the state raises."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._backend = subject.backend

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._backend, name)
        if name == "use_stream":
            return self._use_stream
        return functools.partial(self._call, name, member) if callable(member) else member

    def _call(self, name: str, member: Any, *args: Any, **kwargs: Any) -> Any:
        before = state(self._subject)
        try:
            with surroundings(self._subject):
                return member(*args, **kwargs)
        finally:
            self._compare(name, before)

    @contextlib.contextmanager
    def _use_stream(self, stream: Any) -> Iterator[None]:
        before = state(self._subject)
        try:
            with self._backend.use_stream(stream):
                yield
        finally:
            self._compare("use_stream", before)

    def _compare(self, name: str, before: State) -> None:
        changed = before.differences(state(self._subject))
        assert not changed, f"{name}: {changed}"
