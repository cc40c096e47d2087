"""The order in which units are entered: learned from each pass, used to guess in the next.

A guess that is wrong costs the time of a copy and nothing else.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from anydevice.transfer.unit import Unit

__all__ = ["Course", "Lap"]

#: How many orders are kept: a model is entered in a few ways (prompt, token, encoder, backward).
_KEPT: Final = 16
#: A pass that never comes back to its first unit is cut off after so many times all units.
_LONGEST: Final = 8
#: A unit that was guessed wrongly so many times more than rightly is not guessed for a while.
_PATIENCE: Final = -2


class _Order:
    """Units in the order in which they were entered."""

    def __init__(self, units: list[weakref.ref[Unit]]) -> None:
        self.units = units
        self._places: dict[int, list[int]] | None = None

    def append(self, unit: Unit) -> None:
        """Add one."""
        self.units.append(weakref.ref(unit))
        self._places = None

    def at(self, position: int) -> Unit | None:
        """The unit at a position, if there is one."""
        return self.units[position]() if 0 <= position < len(self.units) else None

    def find(self, unit: Unit, after: int) -> int | None:
        """Where a unit comes next after a position, or else first."""
        if self._places is None:
            self._places = {}
            for place, reference in enumerate(self.units):
                self._places.setdefault(id(reference()), []).append(place)
        places = self._places.get(id(unit), [])
        return next((p for p in places if p > after), places[0] if places else None)


class Course:
    """What is known of a model's order. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self._made = _Order([])
        self._known: dict[int, _Order] = {}

    def add(self, unit: Unit) -> None:
        """Take note of a new unit: before anything is known, the order of making is the guess."""
        self._made.append(unit)

    def learn(self, units: list[weakref.ref[Unit]]) -> None:
        """Keep the order of a pass."""
        first = id(units[0]()) if units else 0
        self._known.pop(first, None)
        self._known[first] = _Order(units)
        while len(self._known) > _KEPT:
            del self._known[next(iter(self._known))]

    def order_from(self, unit: Unit) -> _Order:
        """The order to expect in a pass that begins with a unit."""
        return self._known.get(id(unit), self._made)

    @property
    def longest(self) -> int:
        """How long a pass may become."""
        return _LONGEST * len(self._made.units) + 64


class Lap:
    """One thread's pass through the units.

    Attributes:
        depth: how many calls of the whole model the thread is in; 0 where nobody says.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        self.depth = 0
        self._begin()

    def _begin(self) -> None:
        self._seen: list[weakref.ref[Unit]] = []
        self._expected = _Order([])
        self._position = -1

    def finish(self) -> None:
        """The pass is over: learn from it."""
        if self._seen:
            self._course.learn(self._seen)
        self._begin()

    def step(self, unit: Unit) -> bool:
        """A unit is entered; say whether a new pass began with it."""
        begins = not self._seen or (self._seen[0]() is unit and self.depth == 0)
        if begins or len(self._seen) > self._course.longest:
            self.finish()
            self._expected = self._course.order_from(unit)
        guess = self._expected.at(self._position + 1)
        if guess is unit:
            self._position += 1
            unit.luck = min(unit.luck + 1, -_PATIENCE)
        else:
            if guess is not None and not begins:
                guess.luck = max(guess.luck - 1, _PATIENCE)
            place = self._expected.find(unit, self._position)
            self._position = len(self._expected.units) if place is None else place
        self._seen.append(weakref.ref(unit))
        return begins

    def upcoming(self, count: int) -> list[Unit]:
        """The units that are expected next, without those with which guesses had no luck."""
        units = (self._expected.at(self._position + 1 + i) for i in range(count))
        return [u for u in units if u is not None and u.luck > _PATIENCE]
