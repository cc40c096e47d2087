"""DEV: members in every situation, and what they leave behind."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from typing import Final
from unittest import mock

import hypothesis.strategies as st
import torch

from anydevice_conformance.covering import covering_situations, simpler
from anydevice_conformance.holdings import holdings, nothing_kept, only_new_objects
from anydevice_conformance.laws import hold, hold_each
from anydevice_conformance.members import probes
from anydevice_conformance.probe import Probe
from anydevice_conformance.repeating import (
    assert_ordered,
    calls_with_each_source,
    kinds_of_moves,
)
from anydevice_conformance.situations import Situation, restored, run_in, situations, state
from anydevice_conformance.subject import Subject
from anydevice_conformance.thousands import answers_stay, work_stays

#: Bytes of host memory that an allocator may keep of tensors of a mebibyte that came and went.
_SPARE: Final = 3 << 20
#: How often in a row something must grow to be a leak.
_ROUNDS: Final = 6


def test_DEV_004_device(subject: Subject, index: int) -> None:
    """`device(index)` is the `torch.device` of that index.

    Found: another type, or another device.
    Fix: leave `device` as the base class has it.
    """
    found = subject.backend.device(index)
    assert isinstance(found, torch.device), f"device({index}) returned {found!r}"
    assert found.type == subject.type, f"device({index}) is {found}"
    assert subject.is_host or found.index == index, f"device({index}) is {found}"


def test_DEV_012_every_member_in_every_situation(subject: Subject) -> None:
    """Each member answers right, and leaves the caller's state as it was, in every situation.

    Found: with another current device, on a side stream, in a thread, under another gradient mode,
    or only now and then, a member answers wrong, raises, or changes what it must leave alone.
    Fix: take the device from the index or tensor that is given, never from what is current; put
    back what has to be set for a call, in a ``finally``; keep no state between calls.
    """
    found = probes(subject)

    def law(example: tuple[Probe, Situation]) -> None:
        probe, situation = example
        with restored(subject):
            run_in(subject, situation, lambda: _run(subject, probe, situation.index, probe in no))

    no: list[Probe] = []  # those that decline
    for probe in found:  # what a first call keeps is no leak
        with restored(subject):
            for index in subject.indices:
                try:
                    probe.run(index)
                except NotImplementedError:
                    no += [probe] * probe.may_decline
                except Exception:  # noqa: BLE001 - it is asked again
                    continue
    each = [(probe, situation) for situation in covering_situations(subject) for probe in found]
    with nothing_kept(subject, "asking all members in many situations"):
        hold_each(subject, each, law, lambda one: ((one[0], s) for s in simpler(subject, one[1])))
        if not subject.quick:
            examples = st.tuples(st.sampled_from(found), situations(subject))
            hold(subject, examples, law, examples=700)


def _run(subject: Subject, probe: Probe, index: int, declines: bool) -> None:
    before = state(subject)
    try:
        probe.run(index)
    except AssertionError:
        raise
    except NotImplementedError:
        if not declines:
            raise
    changed = before.differences(state(subject))
    assert not changed, f"{probe}: {changed}"


def test_DEV_013_nothing_is_left(subject: Subject, index: int) -> None:
    """Members called hundreds of times, also when they raise, leave nothing behind.

    Found: each call leaves memory on the device or the host, a file descriptor or a thread.
    Fix: close what a call opens, in a ``finally``; keep no list of what was asked for.
    """
    times = 60 if subject.quick else 300
    found = probes(subject)
    calls = {str(probe): probe.repeat for probe in found if probe.repeat is not None}
    calls.update(kinds_of_moves(subject))
    plain = Situation(index, index)
    odd = Situation(index, subject.indices[-1], subject.capabilities.streams, mode="no_grad")
    with only_new_objects():
        for name, call in calls.items():
            for situation in (plain, odd):
                _assert_nothing_left(subject, situation, name, call, times)
        for name, call in calls_with_each_source(subject).items():
            where = odd if subject.quick else plain
            _assert_nothing_left(subject, where, name, call, times // 5, _SPARE)
    _assert_no_files(subject, Situation(index, index), calls)
    for probe in found:  # and hundreds of calls later each is still right
        with restored(subject):
            _run(subject, probe, index, probe.may_decline)
    if subject.capabilities.streams:
        assert_ordered(subject, index)


def _assert_no_files(
    subject: Subject, situation: Situation, calls: dict[str, Callable[[int], object]]
) -> None:
    """Neither where the user works nor where temporary files go: a folder is both meanwhile."""
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(tempfile, "tempdir", folder),
        mock.patch.dict(os.environ, {"TMPDIR": folder}),
    ):
        before = os.getcwd()
        os.chdir(folder)
        try:
            for name, call in calls.items():
                _repeat(subject, situation, call, 1)
                left = os.listdir(folder)
                assert not left, f"{name} left files behind: {', '.join(left)}"
        finally:
            os.chdir(before)


def _assert_nothing_left(
    subject: Subject,
    situation: Situation,
    name: str,
    call: Callable[[int], object],
    times: int,
    spare: int = 0,
) -> None:
    for _ in range(3):  # the first may keep something; each leaves the caller's state
        _repeat(subject, situation, call, 1)
    grown: dict[str, str] = {}
    for round_ in range(_ROUNDS):
        before = holdings(subject)
        _repeat(subject, situation, call, times)
        after = holdings(subject)
        found = {
            what: f"{times} times {name}: {after[what][0] - one} more {what} than before"
            for what, (one, allowed) in before.items()
            if after[what][0] - one > allowed * times + spare * (what == "bytes of host memory")
        }
        # An allocator may take more once; what leaks does so again.
        grown = {w: text for w, text in found.items() if round_ == 0 or w in grown}
        if not grown:
            return
    raise AssertionError(f"{'; '.join(grown.values())}\nin: {situation!r}")


def _repeat(
    subject: Subject, situation: Situation, call: Callable[[int], object], times: int
) -> None:
    def work() -> None:
        before = state(subject)
        for _ in range(times):
            _quietly(call, situation.index)
        changed = before.differences(state(subject))
        assert not changed, f"DEV-012: after {times} calls {changed}"

    with restored(subject):
        run_in(subject, situation, work)


def _quietly(call: Callable[[int], object], index: int) -> None:
    try:
        call(index)
    except Exception:  # noqa: BLE001 - what is left is the question here, not what is answered
        return


def test_DEV_012_thousands_of_calls(subject: Subject) -> None:
    """A member that is called a thousand times in a row is right each time.

    Found: now and then, or after some hundred calls, an answer is another, or work is not done.
    Fix: keep no count and no pool that runs out; let no error of the driver pass in silence.
    """
    answers_stay(subject)
    work_stays(subject)
