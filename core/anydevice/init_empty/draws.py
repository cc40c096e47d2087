"""Random numbers in the order in which a plain build draws them.

A step that draws random numbers changes its generator, so what a later step draws depends on it.
Nothing is drawn until a value is needed. Then all draws before it are repeated: the numbers of
those steps are drawn and thrown away, in pieces, so that this takes little memory.

[Note: marked states]
Code may read the state of a generator and put it back later (`torch.random.fork_rng`), seed it
again, or copy it, and torch reports none of this. So each draw that is put off leaves its generator
in a state of its own, which no plain build has: a mark. A draw that finds a mark follows on the
draw that left it, whichever way the mark came there; a draw that finds another state begins from
that.
The seed of a state (``initial_seed``) is kept.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Final

import torch

from anydevice.init_empty.steps import Step, View

__all__ = ["Draws"]

#: Elements that are drawn at once; torch fills in groups of 16.
_PIECE: Final = 1 << 20
#: Where the words of the Mersenne twister are in a state, in units of 8 bytes.
_WORDS: Final = slice(3, 3 + 624)
#: What stands in all of them in a mark, but for its number.
_FILLER: Final = 0x5EEDED
#: Of all logs, so that a mark which is left behind is never taken for another.
_NUMBERS: Final = itertools.count()


@dataclasses.dataclass(eq=False)
class _Position:
    """A state of a generator.

    Attributes:
        state: the state that a plain build has; None while it is not known.
        step: the draw that it follows on; None where no draw was put off before.
        before: the position that this draw finds.
        number: of the mark that code sees; None where it sees ``state``.
        first: the state before the first of the draws put off.
    """

    state: torch.Tensor | None
    step: Step | None = None
    before: _Position | None = None
    number: int | None = None
    first: torch.Tensor | None = None

    @property
    def seen(self) -> torch.Tensor:
        """The state that code sees; made anew, as one takes 5 KB."""
        if self.number is not None and self.first is not None:
            return _mark(self.first, self.number)
        assert self.state is not None
        return self.state


class Draws:
    """The draws of one log.

    Args:
        run: runs a step for real.
    """

    def __init__(self, run: Callable[[Step], None]) -> None:
        self._run = run
        self._after: dict[Step, _Position] = {}
        #: The positions whose states are marks.
        self._marked: dict[int, _Position] = {}
        self._known: dict[int, torch.Generator] = {}
        self._has_drawn: dict[int, torch.Generator] = {}

    def append(self, step: Step, generator: torch.Generator) -> None:
        """Note a step that draws, and mark the state of its generator."""
        before = self._here(generator)
        number, first = next(_NUMBERS), before.state if before.first is None else before.first
        after = _Position(None, step, before, number, first)
        generator.set_state(after.seen)
        self._after[step] = self._marked[number] = after
        self._known[_identity(generator)] = generator

    def remove(self, step: Step) -> None:
        """Forget a step that never ran."""
        after = self._after.pop(step)
        assert after.number is not None
        del self._marked[after.number]
        generator = step.generator
        assert generator is not None
        assert after.before is not None
        if _number(generator.get_state()) == after.number:
            generator.set_state(after.before.seen)

    def before(self, step: Step) -> list[Step]:
        """The steps that must run before ``step``, since what they draw depends on data."""
        after = self._after.get(step)
        return [] if after is None or after.before is None else _depending(after.before)

    def run(self, step: Step) -> None:
        """Run a step for real, with the numbers that a plain build gives it."""
        after, generator = self._after[step], step.generator
        assert generator is not None
        assert after.before is not None
        outside = generator.get_state()
        try:
            generator.set_state(_state(after.before))
            self._run(step)
            after.state = generator.get_state()
        finally:
            generator.set_state(outside)
        self._has_drawn[_identity(generator)] = generator

    def late(self, generator: torch.Generator) -> list[Step]:
        """The steps that must run before `catch_up`, since what they draw depends on data."""
        return _depending(self._here(generator))

    def catch_up(self, generator: torch.Generator) -> None:
        """Bring a generator where it would be in a plain build."""
        here = self._here(generator)
        if here.step is not None:
            generator.set_state(_state(here))

    def put_back(self) -> None:
        """Leave no mark: generators get the states that they had before the draws put off."""
        for generator in self._known.values():
            position = self._here(generator)
            while position.before is not None and position.state is None:
                position = position.before
            assert position.state is not None
            generator.set_state(position.state)

    @property
    def used(self) -> list[torch.Generator]:
        """The generators from which a number was needed."""
        return list(self._has_drawn.values())

    def _here(self, generator: torch.Generator) -> _Position:
        """The position of a generator."""
        state = generator.get_state()
        number = _number(state)
        marked = None if number is None else self._marked.get(number)
        return _Position(state) if marked is None else marked


def _identity(generator: torch.Generator) -> int:
    """The address of what a Python object stands for; torch may make several objects for one."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def _mark(state: torch.Tensor, number: int) -> torch.Tensor:
    """A state that no plain build has, with the same seed."""
    words = state.clone().view(torch.int64)
    words[_WORDS] = _FILLER
    words[_WORDS.start], words[_WORDS.start + 1] = number & 0xFFFFFFFF, number >> 32
    return words.view(torch.uint8)


def _number(state: torch.Tensor) -> int | None:
    """The number of a mark; None for other states."""
    words = state.view(torch.int64)[_WORDS].numpy()
    if not (words[2:] == _FILLER).all():
        return None
    return int(words[0]) | int(words[1]) << 32


def _put_off(position: _Position) -> Iterator[_Position]:
    """The positions before which a state is not known, from the last to the first."""
    while position.state is None:
        yield position
        assert position.before is not None
        position = position.before


def _depending(position: _Position) -> list[Step]:
    """The steps whose draws depend on data, among those put off before a position."""
    steps = [p.step for p in _put_off(position) if p.step is not None]
    return [step for step in reversed(steps) if _filled(step) is None]


def _state(position: _Position) -> torch.Tensor:
    """The state of a plain build at a position: all draws before it are repeated."""
    missing = list(_put_off(position))
    if not missing:
        assert position.state is not None
        return position.state
    first = missing[-1].before
    assert first is not None
    assert first.state is not None
    state = first.state
    for passed in reversed(missing):
        assert passed.step is not None
        generator = passed.step.generator
        assert generator is not None
        outside = generator.get_state()
        try:
            generator.set_state(state)
            _draw(passed.step)
            state = generator.get_state()
        finally:
            generator.set_state(outside)
    position.state = state  # not those on the way: a state takes 5 KB
    return state


def _filled(step: Step) -> View | None:
    """What a step fills, where the numbers depend on nothing but the shape of that."""
    if not step.reads and len(step.results) == 1:
        return step.results[0]  # a factory
    rest = (*step.args[1:], *step.kwargs.values())
    alone = len(step.reads) == 1 and not any(isinstance(a, (torch.Tensor, View)) for a in rest)
    is_fill = _name(step) in _FILLS and type(step.args[0]) is View
    return step.args[0] if alone and is_fill else None


def _name(step: Step) -> str:
    return str(getattr(step.function, "__name__", "")).split(".")[0]


#: In-place operations that fill a tensor with random numbers, whatever it held.
_FILLS: Final = frozenset(
    {
        "bernoulli_",
        "cauchy_",
        "exponential_",
        "geometric_",
        "log_normal_",
        "normal_",
        "random_",
        "trunc_normal_",
        "uniform_",
    }
)
#: Of operations that can be done in pieces: which one fills a piece.
_IN_PIECES: Final = {
    "normal_": torch.Tensor.normal_,
    "randn": torch.Tensor.normal_,
    "uniform_": torch.Tensor.uniform_,
    "rand": torch.Tensor.uniform_,
}


def _draw(step: Step) -> None:
    """Draw what a step draws, and throw it away."""
    view = _filled(step)
    assert view is not None
    count = view.size.numel()
    fill = _IN_PIECES.get(_name(step))
    if fill is not None and count > 2 * _PIECE and _is_contiguous(view):
        piece = torch.empty(2 * _PIECE, dtype=view.dtype, device="cpu")
        while count > 2 * _PIECE:
            fill(piece[:_PIECE], generator=step.generator)
            count -= _PIECE
        fill(piece[:count], generator=step.generator)
    elif step.reads:
        scratch = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="cpu")
        step.call((scratch, *step.args[1:]), step.kwargs)
    else:
        step.call(step.args, step.kwargs)


def _is_contiguous(view: View) -> bool:
    """Whether the elements lie in order; torch fills others in another way."""
    expected = 1
    for size, step in zip(reversed(view.size), reversed(view.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
