"""DEV: the first use of the device, in a forked child, and by several threads at once."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import os
from typing import Any

from anydevice_conformance import children
from anydevice_conformance.child_uses import answers_of_each
from anydevice_conformance.marks import slow
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject


def test_DEV_005_counting_starts_no_runtime(subject: Subject) -> None:
    """After counting, a forked child can use the device.

    Found: the device fails or hangs in a child that was forked after `is_available` and
    `device_count`.
    Fix: ask the driver's management library or environment, not the runtime; set no current device
    and make no tensor there.
    """
    _assert_forked(_after_count(subject))


@slow
def test_DEV_006_discovery_starts_no_runtime(subject: Subject) -> None:
    """After `list_backends` and `available_devices`, a forked child can use the device.

    Found: importing the plugin, or what the registry asks of it, started the runtime.
    Fix: import the vendor's package at module level only if that starts nothing; else in the
    methods.
    """
    if not hasattr(os, "fork"):
        left_out("this system has no fork")
    _assert_forked(children.ask("fork_after_discovery", subject.type))


def test_DEV_015_first_use_by_threads(subject: Subject) -> None:
    """In a new process several threads may be the first to use the device, at once.

    Found: the first use of a member, by eight threads at once, failed or gave a wrong answer.
    Fix: start the runtime under a lock; set no state in two steps.
    """
    if subject.quick and hasattr(os, "fork"):  # a child that counted has forked a new process
        found = _after_count(subject)
    else:
        found = children.ask("first_use", subject.type)
    assert found["faults"] == [], (
        f"of 8 threads {len(found['faults'])} failed: {found['faults'][0]}"
    )


def test_DEV_012_whatever_happens_to_the_process(subject: Subject) -> None:
    """Each member answers as at first, whatever happens to its process, up to its end.

    Found: in a process without a home directory, standard input or working directory, once
    torch.distributed has started, variables were changed, a child was forked, or a call was wrong,
    a member answers otherwise.
    Fix: look at the environment once; lay down files only if that can be done; keep no state that a
    failed call can spoil.
    """
    found = children.ask("live", subject.type)
    assert found["faults"] == [], (
        f"{len(found['faults'])} answers became others: {found['faults'][0]}"
    )


def test_PRO_002_in_another_order(subject: Subject) -> None:
    """In a process that asks for the last device first, each device's answers are what they are.

    Found: `local_device`, `numa_node`, a name, a total or an environment goes by who asked first.
    Fix: derive the answer from the argument, not from how many have asked.
    """
    told = _after_count(subject)["backwards"]
    here = answers_of_each(subject.backend)
    for name, answers in told.items():
        assert answers == here[name], (
            f"{name} told a process that asked for the last one first {answers}, not {here[name]}"
        )


def _after_count(subject: Subject) -> dict[str, Any]:
    """What a child says that counted, and then forked; asked once a subject."""
    if not hasattr(os, "fork"):
        left_out("this system has no fork")
    kept: dict[str, Any] = subject.__dict__.setdefault("_after_count", {})
    if not kept:
        kept.update(children.ask("fork_after_count", subject.type))
    return kept


def _assert_forked(found: dict[str, Any]) -> None:
    reason = "".join(found["words"].splitlines()[-1:])  # what a report shows comes first
    ended = f"the forked child ended with {found['code']}: {reason}"
    assert found["code"] == 0, f"{ended}\n{found['words']}"
    assert not found["started"], f"after counting, {found['started']}"
