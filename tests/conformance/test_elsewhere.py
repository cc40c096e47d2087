"""A whole run takes each check twice; and calls of members are watched in all of them."""

from __future__ import annotations

import threading

import pytest
from mutation.warm import Trial, checks_of, run_trials

from anydevice import registry
from anydevice_conformance.elsewhere import take_elsewhere
from anydevice_conformance.monitor import monitored
from anydevice_conformance.situations import current_device
from anydevice_conformance.subject import Subject


@pytest.fixture
def subject(sim):
    sim.configure(devices=2, memory="8MiB")
    backend = registry.get_backend("sim")
    (record,) = [r for r in registry.list_backends() if r.backend is backend]
    return Subject(record, backend, seed=3)


def test_it_is_taken_in_a_thread_on_a_side_stream_with_the_last_device_current(subject):
    own = subject.backend.current_stream(0)

    def check():
        assert threading.current_thread() is not threading.main_thread()
        assert current_device(subject) == 1
        assert subject.backend.current_stream(0) != own
        assert (subject.quick, subject.seed) == (True, 4)
        seen.append(True)

    seen = []
    take_elsewhere(subject, check)
    assert seen
    assert (subject.quick, subject.seed) == (False, 3)


def test_no_new_stream_is_the_current_one_though_they_come_from_a_pool(subject):
    def check():
        current = subject.backend.current_stream(0)
        streams = [subject.backend.new_stream(0) for _ in range(100)]
        assert len(set(streams)) < len(streams)
        assert current not in streams

    take_elsewhere(subject, check)
    assert "new_stream" not in vars(subject.backend)


def test_a_failure_says_where(subject):
    def check():
        raise RuntimeError("no such kernel")

    with pytest.raises(AssertionError, match=r"side stream, in a thread.*RuntimeError: no such"):
        take_elsewhere(subject, check)


@pytest.mark.parametrize("twice", [False, True])
def test_it_finds_what_shows_in_other_threads_only(twice):
    trial = Trial("SeedsInTheMainThread", checks_of("RNG-001"))
    (outcome,) = run_trials([trial], quick=True, twice=twice)
    assert bool(outcome.killed_by) == twice


def test_calls_in_any_check_are_held_to_the_state_and_to_right_answers(subject, monkeypatch):
    kind = type(subject.backend)
    monkeypatch.setattr(kind, "device_name", lambda self, index: None)
    monkeypatch.setattr(kind, "empty_cache", lambda self, index: self.set_device(index))
    with monitored(subject) as faults:
        subject.backend.device_name(0)
        subject.backend.device_count()
        subject.backend.empty_cache(1)
    assert faults == [
        "device_name: it returned None",
        "empty_cache: the current device changed: 0 became 1",
    ]
    assert "device_count" not in vars(subject.backend)
