"""The order in which groups are entered: learned from each pass, used to guess in the next.

A guess that is wrong costs the time of a copy and nothing else.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Final

from anydevice.transfer.group import OffloadGroup

if TYPE_CHECKING:
    from anydevice.transfer.engine import Engine

__all__ = ["ExecutionTrace", "ForwardPass", "PassCall"]

#: How many orders are kept: a model is entered in a few ways (prompt, token, encoder, backward).
_KEPT: Final = 16
#: A pass that never comes back to its first group is cut off after this many times all groups.
_LONGEST: Final = 8
#: A group that was guessed wrongly this many times more than rightly is not guessed for a while.
_PATIENCE: Final = -2


class _Order:
    """Groups in the order in which they were entered."""

    def __init__(self, groups: list[weakref.ref[OffloadGroup]]) -> None:
        self.groups = groups
        self._places: dict[int, list[int]] | None = None

    def append(self, group: OffloadGroup) -> None:
        """Add one."""
        self.groups.append(weakref.ref(group))
        self._places = None

    def at(self, position: int) -> OffloadGroup | None:
        """The group at a position, if there is one."""
        return self.groups[position]() if 0 <= position < len(self.groups) else None

    def find(self, group: OffloadGroup, after: int) -> int | None:
        """Where a group comes next after a position, or else first."""
        if self._places is None:
            self._places = {}
            for place, reference in enumerate(self.groups):
                self._places.setdefault(id(reference()), []).append(place)
        places = self._places.get(id(group), [])
        return next((p for p in places if p > after), places[0] if places else None)


class ExecutionTrace:
    """What is known of a model's order. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self._made = _Order([])
        self._known: dict[int, _Order] = {}

    def add(self, group: OffloadGroup) -> None:
        """Take note of a new group: before anything is known, the order of making is the guess."""
        self._made.append(group)

    def learn(self, groups: list[weakref.ref[OffloadGroup]]) -> None:
        """Keep the order of a pass."""
        first = id(groups[0]()) if groups else 0
        self._known.pop(first, None)
        self._known[first] = _Order(groups)
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def order_from(self, group: OffloadGroup) -> _Order:
        """The order to expect in a pass that begins with a group."""
        return self._known.get(id(group), self._made)

    @property
    def longest(self) -> int:
        """How long a pass may become."""
        return _LONGEST * len(self._made.groups) + 64


class ForwardPass:
    """One thread's pass through the groups.

    Attributes:
        calls: the calls of the whole model that the thread is in; empty where that is not known.
    """

    def __init__(self, trace: ExecutionTrace) -> None:
        self._trace = trace
        self.calls: list[object] = []
        self._begin()

    def _begin(self) -> None:
        self._seen: list[weakref.ref[OffloadGroup]] = []
        self._expected = _Order([])
        self._position = -1

    def finish(self) -> None:
        """The pass is over: learn from it."""
        if self._seen:
            self._trace.learn(self._seen)
        self._begin()

    def step(self, group: OffloadGroup) -> bool:
        """A group is entered; say whether a new pass began with it."""
        begins = not self._seen or (self._seen[0]() is group and not self.calls)
        if begins or len(self._seen) > self._trace.longest:
            self.finish()
            self._expected = self._trace.order_from(group)
        guess = self._expected.at(self._position + 1)
        if guess is group:
            self._position += 1
            group.prefetch_score = min(group.prefetch_score + 1, -_PATIENCE)
        else:
            if guess is not None and not begins:
                guess.prefetch_score = max(guess.prefetch_score - 1, _PATIENCE)
            place = self._expected.find(group, self._position)
            self._position = len(self._expected.groups) if place is None else place
        self._seen.append(weakref.ref(group))
        return begins

    def upcoming(self, count: int) -> list[OffloadGroup]:
        """The groups that are expected next, without those that were guessed wrongly too often."""
        groups = (self._expected.at(self._position + 1 + i) for i in range(count))
        return [u for u in groups if u is not None and u.prefetch_score > _PATIENCE]


class PassCall:
    """A call of the whole model: notifies the engine where it begins and ends. Calls may be nested.

    Without it the engine guesses. Nothing is copied ahead across the end of a pass, where weights
    may be changed in ways that cannot be detected (``weight.data.mul_(2)``).

    `end` may be called again, as `GroupCall.leave`; it does nothing for what has not begun.
    """

    __slots__ = ("_engine", "_thread")

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._thread = 0  # no thread has this id

    def begin(self) -> None:
        """The calling thread begins a call of the whole model."""
        self._thread = threading.get_ident()
        self._engine.begin_pass(self, self._thread)

    def end(self) -> None:
        """The call has ended, also when it failed."""
        if self._thread:
            self._engine.end_pass(self, self._thread)
        self._thread = 0

    def __enter__(self) -> PassCall:
        self.begin()
        return self

    def __exit__(self, *_error: object) -> None:
        try:
            self.end()
        finally:
            self.end()
