"""Checks that hold for all situations: they are generated, and a failure is made small.

A law is a function of one generated situation. `hold` tries it on many, and where it fails shows
the smallest situation that was found to fail: the counterexample. The seed is the session's, so
that a run can be done again; it stands in the report.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies as st

from anydevice_conformance.subject import Subject

__all__ = ["hold", "hold_each"]

T = TypeVar("T")

#: Seconds that are spent on making a counterexample smaller.
_SHRINKING: Final = 4.0
_PHASES: Final = (hypothesis.Phase.generate, hypothesis.Phase.shrink)


class _Search:
    """Tries a law, and remembers the last situation that failed."""

    def __init__(self, law: Callable[[Any], object], shrinking: bool) -> None:
        self._law = law
        self._shrinking = shrinking
        self._deadline: float | None = None
        self.tried = 0
        self.failures: list[tuple[Any, BaseException, int]] = []

    def __call__(self, situation: Any) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            return
        self.tried += 1
        try:
            self._law(situation)
        except pytest.skip.Exception:
            raise
        except Exception as error:
            self.failures.append((situation, error.with_traceback(None), self.tried))
            if self._deadline is None:
                seconds = _SHRINKING if self._shrinking else 0.0
                self._deadline = time.monotonic() + seconds
            raise


def hold(
    subject: Subject,
    situations: st.SearchStrategy[T],
    law: Callable[[T], object],
    *,
    examples: int,
) -> None:
    """Try a law on generated situations.

    Args:
        subject: whose seed and number of examples are used.
        situations: makes them; each has a ``repr`` that a reader understands.
        law: raises where it does not hold.
        examples: how many are tried in an ordinary run.

    Raises:
        AssertionError: it does not hold; with the first line of what was raised, and the
            counterexample.
    """
    search = _Search(law, subject.shrinking)

    @hypothesis.seed(subject.seed)
    @hypothesis.settings(
        max_examples=subject.examples(examples),
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=_PHASES if subject.shrinking else _PHASES[:1],
        print_blob=False,
        report_multiple_bugs=False,
    )
    @hypothesis.given(situations)
    def attempt(situation: T) -> None:
        search(situation)

    try:
        with warnings.catch_warnings(), _no_repetition():
            warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
            attempt()
    except pytest.skip.Exception:
        raise
    except BaseException as error:
        if not search.failures or isinstance(error, KeyboardInterrupt):
            raise
        raise AssertionError(_words(subject, search)) from None
    if search.failures:  # once, and not when it was tried again
        raise AssertionError(_words(subject, search))


def hold_each(
    subject: Subject,
    situations: Iterable[T],
    law: Callable[[T], object],
    smaller: Callable[[T], Iterable[T]],
) -> None:
    """Try a law on each of some situations, where chance would leave some of the kinds out.

    Args:
        subject: whose seed is shown.
        situations: all are tried.
        law: raises where it does not hold.
        smaller: of a situation, smaller ones, the smallest first; tried once it has failed.

    Raises:
        AssertionError: it does not hold; as of `hold`.
    """
    search = _Search(law, subject.shrinking)
    for situation in situations:
        with contextlib.suppress(Exception):
            search(situation)
        if search.failures:
            break
    else:
        return
    for other in smaller(situation) if subject.shrinking else ():
        with contextlib.suppress(Exception):
            search(other)
        if len(search.failures) > 1:
            break
    raise AssertionError(_words(subject, search))


def _no_repetition() -> contextlib.AbstractContextManager[object]:
    """Have every example drawn again.

    By itself hypothesis derives five of six examples from another one, with one choice put in
    another's place. Most of them are then plain: of 14 dtypes the first one comes in half of all.
    """
    from hypothesis.internal.conjecture import engine

    runner = getattr(engine, "ConjectureRunner", None)
    if not hasattr(runner, "generate_mutations_from"):  # an older or a newer version
        return contextlib.nullcontext()
    return mock.patch.object(runner, "generate_mutations_from", return_value=None)


def _words(subject: Subject, search: _Search) -> str:
    situation, error, _ = search.failures[-1]
    first = search.failures[0]
    text = str(error).strip() or repr(error)
    if not isinstance(error, AssertionError):
        text = f"{type(error).__name__}: {text}"
    lines = [text, f"counterexample: {situation!r}"]
    if first[0] != situation:
        lines.append(f"made smaller from: {first[0]!r}")
    lines.append(f"first seen in example {first[2]}, seed {subject.seed}")
    return "\n".join(lines)
