"""The benchmarks run, at sizes at which their numbers mean nothing."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks import harness
from benchmarks.harness import LIMIT, OURS, PEER, Metric, Suite
from warm import run_python

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    return run_python("-m", *arguments, cwd=ROOT)


@pytest.fixture
def _forked_sides(monkeypatch):
    """Each side runs in a fork of a process that has imported the peer."""

    def run_side(command, *, cwd, env, capture_output, text, check):
        assert command[:2] == [sys.executable, "-m"]
        assert capture_output and text and not check  # noqa: PT018
        return run_python(*command[1:], cwd=cwd, env=env, imports=("accelerate",))

    monkeypatch.setattr(harness, "subprocess", SimpleNamespace(run=run_side))


@pytest.mark.usefixtures("_forked_sides")
@pytest.mark.parametrize(
    ("module", "cases"),
    [("benchmarks.checkpoint", ["disk"]), ("benchmarks.transfer", ["balanced"])],
)
def test_a_quick_run_prints_a_table(module, cases, capsys):
    suite = importlib.import_module(module).suite
    with torch.random.fork_rng(devices=[]):
        assert suite.main(["--quick", "--only", *cases]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert rows[0].startswith("| what | ours | peer | ours/peer |")
    assert len(rows) > 2 + len(cases)
    assert all(row.count("|") == rows[0].count("|") for row in rows)


def test_the_script_for_a_real_accelerator_runs_on_the_simulator():
    done = run("benchmarks.gpu", "--device", "sim:0", "--gigabytes", "0.002", "--repeats", "1")
    assert done.returncode == 0, done.stderr
    assert "| anydevice cpu_offload |" in done.stdout
    assert "| accelerate cpu_offload |" in done.stdout


# ---------------------------------------------------------------------- the harness itself


def suite_of(numbers, monkeypatch):
    """A suite whose cases are not run in processes but read from a list."""
    suite = Suite("benchmarks.none", lambda size, folder: None)

    @suite.case(
        "thing",
        Metric("time", "seconds", target=0.5, limit="best"),
        Metric("bytes", "written", "B", most=0),
        sides=(OURS, PEER, LIMIT),
    )
    def thing(side, size, folder):
        return numbers[side].pop(0)

    order = []

    def at_once(self, case, side, size, folder):
        order.append(side)
        return dict(case.work(side, size, folder))

    monkeypatch.setattr(Suite, "_run", at_once)
    return suite, order


def test_it_reports_the_median_of_the_ratios_of_pairs(monkeypatch, capsys):
    numbers = {
        OURS: [{"time": t, "bytes": 0} for t in (99, 1, 2, 40)],
        PEER: [{"time": t, "bytes": 7} for t in (1, 10, 4, 100)],
        LIMIT: [{"best": b} for b in (9, 1, 1, 1)],
    }
    suite, order = suite_of(numbers, monkeypatch)
    assert suite.main(["--pairs", "3", "--strict"]) == 0
    # The first pair warms up; the sides change turns.
    assert order[3:] == [OURS, PEER, LIMIT, LIMIT, PEER, OURS, OURS, PEER, LIMIT]
    time, written = capsys.readouterr().out.splitlines()[-2:]
    # Ratios 0.1, 0.5, 0.4: their median is not the ratio of the medians (2 to 10).
    assert time == "| thing: seconds | 2.00 s | 10.00 s | 0.4 | <= 0.5 | yes | 1.00 s | 2 |"
    assert written == "| thing: written | 0 | 0.0 MB | 0 | ours <= 0 | yes |  |  |"


def test_a_missed_target_is_an_error_only_when_asked(monkeypatch, capsys):
    for arguments, code in ([], 0), (["--strict"], 1):
        numbers = {
            OURS: [{"time": 6.0, "bytes": 0}],
            PEER: [{"time": 10.0, "bytes": 0}],
            LIMIT: [{"best": 1.0}],
        }
        suite, _ = suite_of(numbers, monkeypatch)
        assert suite.main(["--quick", *arguments]) == code
        assert "| 0.6 | <= 0.5 | no |" in capsys.readouterr().out


def test_a_case_that_fails_is_named_with_what_it_said():
    suite = Suite("benchmarks.none", lambda size, folder: None)
    case = harness.Case("thing", "a thing", lambda *_: {}, ())
    with pytest.raises(RuntimeError, match=r"thing \(ours\) failed:[\s\S]*No module named"):
        suite._run(case, OURS, "quick", Path())
