"""A check that has passed, taken again in another situation: see `take_elsewhere`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from anydevice_conformance.outcomes import _Outcome
from anydevice_conformance.situations import Situation, parts_of_situations, run_in
from anydevice_conformance.subject import Subject

__all__ = ["take_elsewhere"]


def take_elsewhere(subject: Subject, check: Callable[[], object]) -> None:
    """Take a check in a thread, on a side stream, with the last device current.

    With few examples, and with others than before: the seed is another.

    Raises:
        AssertionError: it fails there; the message says where it was taken.
    """
    if not subject.indices:
        return
    parts = parts_of_situations(subject)
    situation = Situation(
        current=parts["current"][-1], side_stream=parts["side_stream"][-1], thread=True
    )
    quick, seed = subject.quick, subject.seed
    subject.quick, subject.seed = True, seed + 1
    try:
        with subject.replacing({"new_stream": _no_current_one(subject)}):
            run_in(subject, situation, check)
    except _Outcome:  # what cannot be checked there was checked before
        return
    except Exception as error:
        raise AssertionError(
            f"taken again, {situation!r}: {type(error).__name__}: {error}"
        ) from error
    finally:
        subject.quick, subject.seed = quick, seed


def _no_current_one(subject: Subject) -> Callable[[int], Any]:
    """`new_stream`, but for those that are current: torch's own come from a pool, in turns."""
    make = subject.backend.new_stream

    @functools.wraps(make)
    def new_stream(index: int) -> Any:
        found = make(index)
        return make(index) if found == subject.backend.current_stream(index) else found

    return new_stream
