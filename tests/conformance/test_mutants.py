"""The suite is tested by broken backends: each must be caught by the check of its paragraph."""

from __future__ import annotations

import collections
import gc

import psutil
import pytest

from anydevice import registry
from anydevice_conformance import simulator
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.inprocess import run_checks
from anydevice_conformance.mutants import gallery, installed
from anydevice_conformance.specification import load_specification

MACHINE = {"devices": 2, "memory": ["64MiB", "96MiB"], "mode": "lazy"}
BIG_MACHINE = {"devices": 1, "memory": "5GiB", "mode": "lazy"}


def checks_of(paragraph):
    return [check.name for check in load_catalogue().values() if check.paragraph == paragraph]


def start(machine, monkeypatch):
    """Simulate a machine, here and in child processes."""
    simulator.configure(**machine)
    memory = machine["memory"]
    text = memory if isinstance(memory, str) else ":".join(memory)
    words = f"devices={machine['devices']},memory={text},mode={machine['mode']}"
    monkeypatch.setenv(simulator.ENVIRONMENT_VARIABLE, words)


def outcome(record, names):
    events = run_checks(record, names)
    results = [e for e in events if e["event"] == "result"]
    flags = [e for e in events if e["event"] == "flag"]
    return results, flags


@pytest.mark.parametrize("name", [m.name for m in gallery().values() if not m.crash])
def test_each_mutant_is_caught(name, monkeypatch):
    mutant = gallery()[name]
    if mutant.big and psutil.virtual_memory().available < 12 << 30:
        pytest.skip("needs 12 GiB of memory")
    start(BIG_MACHINE if mutant.big else MACHINE, monkeypatch)
    try:
        with installed(name) as record:
            results, flags = outcome(record, checks_of(mutant.paragraph))
    finally:
        gc.collect()
        simulator.configure()
    errors = [r for r in results if r["status"] == "error"]
    assert not errors
    if mutant.flag:
        assert flags
        assert not [r for r in results if r["status"] == "failed"]
    else:
        failed = [r for r in results if r["status"] == "failed"]
        assert failed, f"{name} went unnoticed: {mutant.story} {results}"


def test_every_paragraph_has_a_check_and_a_mutant():
    paragraphs = list(load_specification())
    checked = collections.Counter(check.paragraph for check in load_catalogue().values())
    broken = collections.Counter(mutant.paragraph for mutant in gallery().values())
    assert [p for p in paragraphs if not checked[p]] == []
    assert [p for p in paragraphs if not broken[p]] == []
    assert set(checked) | set(broken) <= set(paragraphs)


def test_every_mutant_says_what_it_is():
    assert [m.name for m in gallery().values() if not m.story] == []


def test_the_right_backend_comes_back():
    before = registry.get_backend("sim")
    with installed("SeedDoesNothing"):
        assert type(registry.get_backend("sim")).__name__ == "SeedDoesNothing"
    assert registry.get_backend("sim") is before
