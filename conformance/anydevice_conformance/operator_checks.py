"""Calls an operator on the device and on the host, and compares: values, memory and refusals."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

from anydevice_conformance.ambients import AMBIENTS
from anydevice_conformance.data import short_name
from anydevice_conformance.operator_calls import WRITES, called, in_double, leaves, mapped
from anydevice_conformance.operator_results import are_equal, assert_alike
from anydevice_conformance.operator_trials import Trial
from anydevice_conformance.programs_of_operators import aligned, has_absent
from anydevice_conformance.refusals import is_refusal, is_refused_view
from anydevice_conformance.situations import run_in
from anydevice_conformance.subject import Subject
from anydevice_conformance.usual_operator import Usual

__all__ = ["Operators"]

#: So many other arguments are tried where an operator fails.
_OTHERS: Final = 8


class Operators:
    """A device's operators: which of them work, in which dtype and way."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._work: set[tuple[str, torch.dtype, str]] = set()
        self._fail: dict[tuple[str, torch.dtype, str], tuple[Trial, str]] = {}

    def check(self, trial: Trial) -> None:
        """Call an operator on the device and on the host, and compare.

        Raises:
            AssertionError: it is wrong, or it fails with what it must have.
        """
        subject = self._subject
        with warnings.catch_warnings(), AMBIENTS[trial.situation.ambient](subject):
            warnings.simplefilter("ignore")
            found, plain = run_in(subject, trial.situation, lambda: self._results(trial))
            for way, given in found.items():
                result, wanted = aligned(given, plain[way])
                digits = "" if way == "gradient" else getattr(trial.description, "digits", "")
                if are_equal(result, wanted, digits):
                    continue
                again = run_in(subject, trial.situation, partial(_again, trial, way))
                if not are_equal(again, plain[way], digits):
                    continue  # of the host itself, which leaves something unwritten
                wide = run_in(subject, trial.situation, partial(_in_double, trial, way))
                assert_alike(trial.name, way, result, wanted, wide, digits)

    def _results(self, trial: Trial) -> tuple[dict[str, Any], dict[str, Any]]:
        """The device's and the host's by way.

        Without what draws random numbers, of which the checks of RNG speak, and what the device
        or the host does not have: a device need not have all that torch has.
        """
        before = torch.random.get_rng_state()
        plain = dict(_host(trial))
        given = trial.arguments(self._subject.device(trial.situation.index))
        places = (isinstance(a, torch.Tensor | torch.device) for a in leaves(given))
        if not any(places) or not torch.equal(before, torch.random.get_rng_state()):
            return {}, {}
        found = {}
        for way in [way for way in trial.ways if way in plain]:
            try:
                result = _call(trial, way, given)
                fetched = mapped(lambda one: self._fetched(trial, one), result)
            except AssertionError:
                raise
            except Exception as error:  # noqa: BLE001 - whichever the device raises
                self._note_failure(trial, way, error)
                if way in WRITES:
                    break  # what it has written into its arguments is not said
                continue
            if has_absent(fetched):
                self._assert_refused_plainly(trial, way, fetched)
            if way == "plain":
                self._assert_apart(trial, result, plain.pop("shares"))
            found[way] = fetched
            self._note_success(trial, way)
        return found, plain

    def _fetched(self, trial: Trial, result: Any) -> Any:
        if not isinstance(result, torch.Tensor):
            return result
        there = self._subject.is_on(result, trial.situation.index)
        assert there, f"{trial.name} gave a result on {result.device}"
        return _copied(result) if self._subject.is_host else result.cpu()

    def _assert_apart(self, trial: Trial, result: Any, plain: list[bool]) -> None:
        """A result shares no memory with an argument where it does not on the host."""
        if self._subject.strided and not self._subject.is_host:
            for one, other in zip(_shares(result), plain, strict=False):
                assert other or not one, (
                    f"{trial.name} gave a result that is an argument's own memory"
                )

    def _assert_refused_plainly(self, trial: Trial, way: str, found: Any) -> None:
        """What it refuses here it refuses where the same values are contiguous, too."""
        plainly = trial.plainly()
        if plainly == trial:
            return

        def attempt() -> Any:
            given = plainly.arguments(self._subject.device(plainly.situation.index))
            return list(_up_to(plainly, way, given))[-1]

        again = run_in(self._subject, plainly.situation, attempt)
        pairs = zip(_refused(found), _refused(again), strict=True)
        assert all(other or not one for one, other in pairs), (
            f"{trial.name} ({way}) refuses what it does where the same values are contiguous, on "
            "device 0, in its default stream and this thread"
        )

    def _note_success(self, trial: Trial, way: str) -> None:
        key = trial.name, trial.dtype, way
        self._work.add(key)
        if key in self._fail:
            other, words = self._fail[key]
            raise AssertionError(f"{words}; and works for others: fails for {other!r}")

    def _note_failure(self, trial: Trial, way: str, error: Exception) -> None:
        """Whether the device does not have the operator, or has it and fails."""
        if self._subject.backend.is_out_of_memory(error) or is_refused_view(error):
            return
        key = trial.name, trial.dtype, way
        words = f"{trial.name} of {short_name(trial.dtype)} ({way}) raises {_words(error)}"
        plainly = trial.plainly()
        if plainly != trial and _works(self._subject, plainly, way):
            raise AssertionError(
                f"{words}, and does not where the same values are contiguous, on device 0, in "
                "its default stream and this thread"
            )
        if is_refusal(error):
            return
        if way == "into out" and not isinstance(trial.description, Usual):
            return  # of torch's own samples some have results that no out= fits
        others = _others(plainly)
        if key in self._work or any(_works(self._subject, other, way) for other in others):
            raise AssertionError(f"{words}, and works for other values and shapes")
        self._fail.setdefault(key, (trial, words))


def _refused(result: Any) -> list[bool]:
    """Of each call of a program, whether there is no result."""
    return list(map(has_absent, result[0]))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"


def _others(trial: Trial) -> Iterator[Trial]:
    """The same of a usual operator with other arguments."""
    usual = trial.description
    for seed in range(_OTHERS if isinstance(usual, Usual) else 0):
        yield dataclasses.replace(trial, sample=usual.sample(trial.dtype, seed))


def _works(subject: Subject, trial: Trial, way: str) -> bool:
    """Whether the device does it, rightly or not."""

    def attempt() -> bool:
        with contextlib.suppress(Exception):
            given = trial.arguments(subject.device(trial.situation.index))
            for result in _up_to(trial, way, given):
                mapped(lambda one: one.cpu() if isinstance(one, torch.Tensor) else one, result)
            return True
        return False

    return run_in(subject, trial.situation, attempt)


def _shares(result: Any) -> list[bool]:
    """Of each thing that an operator gave, whether it is memory of an argument's."""
    found, arguments = result
    held = {_memory(one) for one in leaves(arguments)} - {0}
    return [_memory(one) in held for one in leaves(found)]


def _memory(value: Any) -> int:
    """Where the storage begins; 0 where there is none, or the device does not tell."""
    with contextlib.suppress(Exception):
        return int(value.untyped_storage().data_ptr()) if value.numel() else 0
    return 0


def _host(trial: Trial) -> Iterator[tuple[str, Any]]:
    """The host's results by way, and whether those of the plain one share memory."""
    given = trial.arguments(torch.device("cpu"))
    for way in trial.ways:
        try:
            result = _call(trial, way, given)
            if way == "plain":
                yield "shares", _shares(result)
            yield way, mapped(_copied, result)  # a later way writes into the arguments
        except Exception:  # noqa: BLE001 - it does not have it
            if way in WRITES:
                return


def _up_to(trial: Trial, wanted: str, given: Any) -> Iterator[Any]:
    """The results of what writes into the arguments before a way, and of that."""
    for way in trial.ways[: trial.ways.index(wanted) + 1]:
        if way == wanted or way in WRITES:
            yield _call(trial, way, given)


def _again(trial: Trial, way: str) -> Any:
    """The host's result once more."""
    return list(_up_to(trial, way, trial.arguments(torch.device("cpu"))))[-1]


def _copied(result: Any) -> Any:
    return result.clone() if isinstance(result, torch.Tensor) else result


def _in_double(trial: Trial, wanted: str) -> Any:
    """The host's with twice the digits; None where it has none, or torch cannot."""
    with contextlib.suppress(Exception):
        wide = in_double(trial.arguments(torch.device("cpu")))
        return None if wide is None else list(_up_to(trial, wanted, wide))[-1]
    return None


def _call(trial: Trial, way: str, given: Any) -> Any:
    return called(way, trial.description, trial.sample, trial.layouts[-1], given)
