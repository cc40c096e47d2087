"""The suite is tested by broken backends: each must be caught by the check of its paragraph."""

from __future__ import annotations

import collections
import json
import os
from pathlib import Path

import psutil
import pytest
from mutants import gallery, installed
from mutation.harmless import HARMLESS
from mutation.rules import chosen, made, member_of

from anydevice import registry
from anydevice_conformance import simulator, warm
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.specification import load_specification

pytestmark = [
    pytest.mark.timeout(900),  # the gallery is tried within the first test
    pytest.mark.xdist_group("gallery"),  # and once, not in each worker
]

HERE = str(Path(__file__).parent)


@pytest.fixture(scope="module")
def tried(tmp_path_factory, _warm_variables):
    """A function that runs the engine once; its outcomes by mutant."""

    def run(*options):
        folder = tmp_path_factory.mktemp("outcomes")
        file, path = folder / "outcomes.json", os.environ.get("PYTHONPATH", "")
        here = {"PYTHONPATH": os.pathsep.join(filter(None, [HERE, path]))}
        with (folder / "log").open("wb") as log:
            engine = warm.start(
                "mutation",
                [*options, "--json", str(file)],
                environment={**os.environ, **_warm_variables, **here},
                output=log,
            )
            code = engine.wait()
        assert code == 0, (folder / "log").read_text()[-4000:]
        return {outcome["mutant"]: outcome for outcome in json.loads(file.read_text())}

    return run


@pytest.fixture(scope="module")
def outcomes(tried):
    """What became of the gallery; all of it in one warm process."""
    options = ["--gallery"]
    if psutil.virtual_memory().available < 12 << 30:
        options.append("--small")
    return tried(*options)


@pytest.mark.parametrize("name", [m.name for m in gallery().values() if not m.crash])
def test_each_mutant_is_caught(name, outcomes):
    mutant = gallery()[name]
    if mutant.big and name not in outcomes:
        pytest.skip("needs 12 GiB of memory")
    outcome = outcomes[name]
    assert not outcome["errors"]
    if mutant.flag:
        assert outcome["flags"]
        assert not outcome["failed"]
    else:
        assert outcome["failed"], f"{name} went unnoticed: {mutant.story} {outcome}"


def test_every_paragraph_has_a_check_and_a_mutant():
    paragraphs = list(load_specification())
    checked = collections.Counter(check.paragraph for check in load_catalogue().values())
    broken = collections.Counter(mutant.paragraph for mutant in gallery().values())
    assert [p for p in paragraphs if not checked[p]] == []
    assert [p for p in paragraphs if not broken[p]] == []
    assert set(checked) | set(broken) <= set(paragraphs)


def test_every_mutant_says_what_it_is():
    assert [m.name for m in gallery().values() if not m.story] == []


def test_many_faults_at_once_never_pass(tried):
    found = tried("--together", "40", "--count", "3", "--quick")
    assert len(found) == 3
    for outcome in found.values():
        assert len(outcome["mutant"].split("+")) == 40
        assert outcome["failed"], outcome


def test_the_right_backend_comes_back():
    simulator.configure()
    before = registry.get_backend("sim")
    with installed("SeedDoesNothing"):
        assert type(registry.get_backend("sim")).__name__ == "SeedDoesNothing"
    assert registry.get_backend("sim") is before


def test_rules_reach_every_member_of_the_interface():
    members = {member_of(name) for name in made()}
    assert len(members) > 20
    assert {member_of(name) for name in chosen(100)} == members
    assert chosen(50, seed=3) == chosen(50, seed=3) != chosen(50, seed=4)


def test_harmless_mutants_are_still_made_and_have_reasons():
    assert [name for name in HARMLESS if name not in made()] == []
    assert [name for name, reason in HARMLESS.items() if len(reason) < 20] == []
