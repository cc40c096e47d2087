"""The offload store under processes that die, meet, or run out of room. The kills are real."""

import json
import sys
from pathlib import Path

import pytest
from warm import run_python

if sys.platform == "win32":
    pytest.skip("forks and signals", allow_module_level=True)

KILLER = Path(__file__).with_name("_store_killer.py")


def run(name, folder):
    done = run_python("-W", "ignore", KILLER, name, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_killed_at_each_step_a_folder_is_complete_or_refused_and_heals(tmp_path):
    states = run("killed_at_each_step", tmp_path)
    assert len(states) > 2 * 20
    assert set(states) == {"refused", "complete", "healed"}  # complete: killed after the manifest


def test_killed_at_random_a_folder_is_complete_or_refused_and_heals(tmp_path):
    states = run("killed_at_random", tmp_path)
    assert "WRONG" not in states
    assert states.count("healed") == 40


def test_processes_that_write_the_same_weights_at_once_all_succeed(tmp_path):
    assert run("same_weights_at_once", tmp_path) == [0, 0, 0, 0, 0, "complete"]


def test_of_processes_that_write_other_weights_at_once_one_succeeds(tmp_path):
    assert run("other_weights_at_once", tmp_path) == [0, 1, 1, 1]


def test_a_limit_of_the_system_met_half_way_leaves_nothing(tmp_path):
    assert run("file_size_limit", tmp_path) == [1, "refused"]
