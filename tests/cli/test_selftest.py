"""``anydevice test``: what it says when all is well, and when something is not."""

import json
import re

import pytest
from launching import fork_launches, warm_python
from warm import add_plugin_of_torch

from anydevice import cli

#: Each check, and what it says when all is well with two processes.
CHECKS = {
    "processes": r"(cpu|sim:0, sim:1)",
    "collectives": "gather, reduce, pad",
    "random numbers": "one seed, one sequence",
    "loaders": "23 examples, each once",
    "training": r"loss \d+\.\d{3} -> \d+\.\d{3}",
    "mixed precision": r"(bf16|bf16, fp16)",
    "save and load": "a state, bit for bit",
}
#: In the second process, `gather` gives other values than were sent; all else is as it was.
FAULT = """
import os

def load():
    if os.environ.get("RANK") == "1":
        from anydevice import Accelerator

        before = Accelerator.gather
        Accelerator.gather = lambda self, tensor: before(self, tensor) + 1
"""


def results(out):
    """Of each check: its state, and what it says."""
    lines = [re.fullmatch(r"(.{16}) (ok|failed) +\d+\.\d\d s  (.*)", s) for s in out.splitlines()]
    return {line[1].strip(): (line[2], line[3]) for line in lines if line}


def assert_well(found, *, but=()):
    assert list(found) == list(CHECKS)
    for name, pattern in CHECKS.items():
        if name not in but:
            state, said = found[name]
            assert state == "ok", (name, said)
            assert re.fullmatch(pattern, said), (name, said)


def test_on_accelerators(simulator, monkeypatch, capfd):
    simulator.configure(devices=2, memory="64MiB")
    monkeypatch.setenv("ANYDEVICE_SIMULATOR", "devices=2,memory=64MiB")
    assert cli.main(["test"]) == 0
    out = capfd.readouterr().out
    assert out.startswith("2 processes, sim, ")
    assert_well(results(out))
    assert out.endswith("all is well\n")


@pytest.mark.xdist_group("distributed")  # one worker has the process that forks others
def test_a_check_that_fails_on_one_process_is_named(tmp_path, monkeypatch, capfd):
    """The processes are forks: `test_on_accelerators` starts them as users do."""
    add_plugin_of_torch(tmp_path, "a_fault", FAULT)
    monkeypatch.setenv("PYTHON_EXEC", warm_python(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fork_launches(monkeypatch)
    assert cli.main(["test", "--cpu", "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert (report["num_processes"], report["device_type"]) == (2, "cpu")
    found = {check["name"]: (check["state"], check["message"]) for check in report["checks"]}
    assert_well(found, but=["collectives"])
    state, said = found["collectives"]
    assert state == "failed"
    assert said.startswith("rank 1: AssertionError: gathered values: [1.0, 1.0, 2.0, 2.0] in place")


@pytest.mark.parametrize(
    "words",
    [["--num_processes", "0"], ["--num_processes", "two"], ["--device_type", "npu"]],
)
def test_what_cannot_be_tested_is_said_at_once(words, capsys):
    assert cli.main(["test", *words]) == 1
    assert words[0].strip("-") in capsys.readouterr().err
