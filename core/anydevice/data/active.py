"""Which loader is being iterated, and whether its last batch is out: each iterator's own knowledge.

A loop inside another loop, an evaluation in the middle of an epoch, or a loop that is left early
changes no other one: every iteration has its own object here, and takes only that away.
"""

from __future__ import annotations

from typing import Any

from anydevice.data.rounds import Round

__all__ = ["Iteration", "active_iterations", "current_iteration"]

_ACTIVE: list[Iteration] = []


class Iteration:
    """One pass over a prepared loader.

    Attributes:
        loader: the loader that is iterated.
        last: whether the batch that is out now is the loader's last one.
        round: what each process got with that batch; None where all got the same number of
            samples and none was repeated.
        calls: how often `accumulate` ran since that batch came out, for each set of models.
        calls_before: how often it ran for the batch before.
        flushed: the sets of models for which the end has been answered with an optimizer step.
    """

    __slots__ = ("calls", "calls_before", "flushed", "last", "loader", "round")

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.last = False
        self.round: Round | None = None
        self.calls: dict[Any, int] = {}
        self.calls_before: dict[Any, int] = {}
        self.flushed: set[Any] = set()

    def hand_out(self, note: Round | None, last: bool) -> None:
        """Note that the next batch comes out now."""
        self.round = note
        self.last = last
        self.calls_before, self.calls = self.calls, {}
        if _ACTIVE[-1] is not self:  # loops side by side: the one that gave last is meant
            _ACTIVE.remove(self)
            _ACTIVE.append(self)

    def begin(self) -> None:
        """Enter the list of running iterations."""
        _ACTIVE.append(self)

    def end(self) -> None:
        """Leave it, wherever in it this iteration is."""
        if self in _ACTIVE:
            _ACTIVE.remove(self)


def current_iteration() -> Iteration | None:
    """The iteration whose batch came out last and that has not ended; None outside of loops."""
    return _ACTIVE[-1] if _ACTIVE else None


def active_iterations() -> list[Iteration]:
    """All iterations that have not ended, the current one last."""
    return list(_ACTIVE)
