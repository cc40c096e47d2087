"""Random numbers in the order in which a plain build draws them.

A step that draws random numbers changes its generator, so what a later step draws depends on it.
Nothing is drawn until a value is needed. Then all draws before it are made up for: the numbers of
those steps are drawn and thrown away, in pieces, so that this takes little memory.

A segment is a run of steps with no draw between them, and the state of the generator before it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch

from anydevice.init_empty.steps import Step, View

__all__ = ["Draws"]

#: Elements that are drawn at once; torch fills in groups of 16.
_PIECE: Final = 1 << 20


@dataclasses.dataclass(eq=False)
class _Segment:
    """Steps that have not drawn yet, and the state that the first of them finds."""

    generator: torch.Generator
    state: torch.Tensor
    steps: list[Step] = dataclasses.field(default_factory=list)


class Draws:
    """The draws of one log.

    Args:
        run: runs a step for real.
    """

    def __init__(self, run: Callable[[Step], None]) -> None:
        self._run = run
        self._segment_of: dict[Step, _Segment] = {}
        #: The last segment that follows on a state which a generator had outside.
        self._last: dict[tuple[int, bytes], _Segment] = {}
        self._has_drawn: dict[int, torch.Generator] = {}

    def append(self, step: Step, generator: torch.Generator) -> None:
        """Note a step that draws."""
        state = generator.get_state()
        key = _key(generator, state)
        segment = self._last.get(key)
        if segment is None:
            segment = self._last[key] = _Segment(generator, state)
        segment.steps.append(step)
        self._segment_of[step] = segment

    def remove(self, step: Step) -> None:
        """Forget a step that never ran."""
        self._segment_of.pop(step).steps.remove(step)

    def before(self, step: Step) -> list[Step]:
        """The steps that must run before ``step``, since what they draw depends on data."""
        segment = self._segment_of.get(step)
        if segment is None:
            return []
        earlier = segment.steps[: segment.steps.index(step)]
        return [other for other in earlier if not _is_plain(other)]

    def run(self, step: Step) -> None:
        """Run a step for real, with the numbers that a plain build gives it."""
        segment = self._segment_of.pop(step)
        generator = segment.generator
        outside = generator.get_state()
        place = segment.steps.index(step)
        generator.set_state(segment.state)
        for other in segment.steps[:place]:
            _draw(other)
        self._run(step)
        # The segment ends here; what follows begins with the state as it is now.
        rest = _Segment(generator, generator.get_state(), segment.steps[place + 1 :])
        del segment.steps[place:]
        self._segment_of.update(dict.fromkeys(rest.steps, rest))
        for key, last in self._last.items():
            if last is segment:
                self._last[key] = rest
        generator.set_state(outside)
        self._has_drawn[_identity(generator)] = generator

    def late(self, generator: torch.Generator) -> list[Step]:
        """The steps that must run before `catch_up`, since what they draw depends on data."""
        segment = self._last.get(_key(generator, generator.get_state()))
        return [] if segment is None else [s for s in segment.steps if not _is_plain(s)]

    def catch_up(self, generator: torch.Generator) -> None:
        """Bring a generator where it would be in a plain build."""
        outside = generator.get_state()
        key = _key(generator, outside)
        segment = self._last.get(key)
        if segment is None:
            return
        generator.set_state(segment.state)
        for step in segment.steps:
            _draw(step)
        del self._last[key]

    @property
    def used(self) -> list[torch.Generator]:
        """The generators from which a number was needed."""
        return list(self._has_drawn.values())


def _key(generator: torch.Generator, state: torch.Tensor) -> tuple[int, bytes]:
    return _identity(generator), state.numpy().tobytes()


def _identity(generator: torch.Generator) -> int:
    """The address of what a Python object stands for; torch may make several objects for one."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def _is_plain(step: Step) -> bool:
    """Whether what a step draws depends on nothing but the shape that it fills."""
    return _filled(step) is not None


def _filled(step: Step) -> View | None:
    """What a step fills, where it does so from numbers alone."""
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
        step.function(scratch, *step.args[1:], **step.kwargs)
    else:
        step.function(*step.args, **step.kwargs)


def _is_contiguous(view: View) -> bool:
    """Whether the elements lie in order; torch fills others in another way."""
    expected = 1
    for size, step in zip(reversed(view.size), reversed(view.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True
