"""DTY: whatever operator of torch's the device has, against the host."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Final

from anydevice_conformance.laws import hold_each
from anydevice_conformance.marks import slow
from anydevice_conformance.operator_trials import Trial, check_trial, trials
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject
from anydevice_conformance.torch_operators import unseeded

#: So many calls of each operator in each dtype.
_ROUNDS: Final = 3
#: After so many seconds a slow device has been tried enough.
_SECONDS: Final = 120.0


@slow
def test_DTY_019_operators(subject: Subject) -> None:
    """Every operator of torch's that the device has is right, in each dtype and way to call it.

    Found: an operator gives another value, shape or dtype than the host, or changes an argument.
    Fix: mend the kernel, or have it raise ``NotImplementedError``: what is not there harms nobody.
    """
    rounds = max(1, subject.count // 20) if subject.count else _ROUNDS
    try:
        tried = list(itertools.islice(trials(subject, rounds), 1))
    except ImportError as error:
        left_out(f"torch's descriptions of its operators cannot be imported: {error}")
    assert tried, "torch describes no operator"

    def law(trial: Trial) -> None:
        check_trial(subject, trial)

    with unseeded():
        hold_each(subject, _in_time(trials(subject, rounds)), law, lambda trial: ())


def _in_time(tried: Iterator[Trial]) -> Iterator[Trial]:
    end = time.monotonic() + _SECONDS
    return itertools.takewhile(lambda trial: time.monotonic() < end, tried)
