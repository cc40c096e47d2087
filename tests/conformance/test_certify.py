"""The command, as a vendor runs it: in a process of its own, in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm import add_plugin_of_torch, run_python

from anydevice.cli import main
from anydevice_conformance import report as reports
from anydevice_conformance import simulator
from anydevice_conformance.catalogue import load_catalogue
from anydevice_conformance.runner import run_suite

pytestmark = pytest.mark.usefixtures("warm_process")

MACHINE = "devices=2,memory=64MiB:96MiB,mode=lazy"
MUTANT = """
def load():
    import mutants

    mutants.install("CrashesInThreads")
"""
HOSTILE = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    items.clear()
"""


def run(command, folder, **environment):
    done = run_python("-m", *command, cwd=folder, env={**os.environ, **environment}, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run on the simulator, from a folder whose pytest settings would spoil it."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "conftest.py").write_text(HOSTILE)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    command = ["anydevice", "certify", "sim", "--quick"]
    environment = {simulator.ENVIRONMENT_VARIABLE: MACHINE, "PYTEST_ADDOPTS": "-k nothing"}
    code, output = run(command, folder, **environment)
    report = json.loads((folder / "certify-sim" / "report.json").read_text())
    return code, output, report, folder / "certify-sim"


def test_the_right_backend_passes(quick):
    code, output, report, _ = quick
    assert report["verdict"] == "passed, not certified", output
    assert report["because"] == ["--quick leaves checks out"]
    assert code == 0
    assert "Verdict: passed, not certified" in output


def test_its_gaps_are_not_claimed_and_raise_no_alarm(quick):
    report = quick[2]
    statuses = {r["check"]: r["status"] for r in report["results"]}
    assert set(statuses) == set(load_catalogue())
    assert "failed" not in statuses.values()
    assert statuses["test_COL_002_all_reduce"] == "passed"
    assert statuses["test_MEM_012_unified_memory"] == "not claimed"
    assert statuses["test_MEM_008_another_process_is_seen"] == "skipped"
    assert statuses["test_MOV_020_above_4_gib"] == "skipped"
    assert report["flags"] == []


def test_the_report_is_sound_and_stamped(quick):
    _, _, report, folder = quick
    assert reports.validate(report) == []
    stamps = report["stamps"]
    assert stamps["command"] == ["anydevice", "certify", "sim", "--quick"]
    assert [device["total"] for device in stamps["devices"]] == [64 << 20, 96 << 20]
    assert stamps["plugin"]["distribution"] == "anydevice"
    assert {"report.json", "report.html", "junit.xml", "badge.svg"} <= set(os.listdir(folder))


def test_check_accepts_it(quick, capsys):
    assert main(["certify", "--check", str(quick[3] / "report.json")]) == 0
    assert "a sound report of sim" in capsys.readouterr().out


def test_check_refuses_a_changed_one(quick, tmp_path, capsys):
    report = {**quick[2], "verdict": "certified", "certified": True, "because": []}
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    assert main(["certify", "--check", str(file)]) == 1
    assert "the results make it" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "", "{", "[]"])
def test_check_refuses_what_is_no_report(tmp_path, capsys, text):
    file = tmp_path / "report.json"
    if text is not None:
        file.write_text(text)
    assert main(["certify", "--check", str(file)]) == 1
    assert str(file) in capsys.readouterr().err


def test_words_that_contradict(capsys):
    assert main(["certify"]) == 2
    assert main(["certify", "cpu", "--static", "npu"]) == 2
    assert "give one of" in capsys.readouterr().err


def test_unknown_type(capsys):
    assert main(["certify", "nonsense"]) == 1
    assert "no backend for device type 'nonsense'" in capsys.readouterr().err


def test_static_is_never_certified(capsys):
    assert main(["certify", "--static", "npu"]) == 0
    assert "static only, never certified" in capsys.readouterr().out


def test_a_crash_is_one_failed_check(tmp_path, monkeypatch):
    monkeypatch.setenv(simulator.ENVIRONMENT_VARIABLE, MACHINE)
    add_plugin_of_torch(tmp_path, "a_mutant", MUTANT)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(__file__).parent}")
    results = []
    events = run_suite(
        "sim",
        tmp_path,
        quick=True,  # the fault is in threads, which a whole run takes each check in
        only=["MOV_018", "MOV_019", "MOV_021"],
        on_result=results.append,
    )
    report = reports.build(events)
    statuses = {r["check"]: (r["status"], r["message"]) for r in report["results"]}
    assert statuses["test_MOV_019_threads"][0] == "failed"
    assert "SIGABRT" in statuses["test_MOV_019_threads"][1]
    # the innermost call comes first
    assert " in before" in statuses["test_MOV_019_threads"][1].splitlines()[2]
    assert statuses["test_MOV_018_index_spellings"][0] == "passed"
    assert statuses["test_MOV_021_odd_sizes"][0] == "passed"
    assert list(dict.fromkeys(r["check"] for r in results)) == [
        "test_MOV_018_index_spellings",
        "test_MOV_019_threads",
        "test_MOV_021_odd_sizes",
    ]


# ---------------------------------------------------------------------- under pytest itself


def test_pytest_with_an_override_and_a_choice(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import pytest\n\n@pytest.fixture\ndef pair():\n    return (0, 0)\n"
    )
    command = ["pytest", "--pyargs", "anydevice_conformance", "--anydevice-backend", "cpu"]
    command += ["-k", "DEV_002 or DEV_003", "--anydevice-output", "out", "-c", os.devnull, "-q"]
    code, output = run(command, tmp_path)
    assert code == 0, output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"] == "passed, not certified"
    assert len(report["deselected"]) == len(load_catalogue()) - 2
    assert any("conftest" in what for what in report["overrides"]), report["overrides"]
    assert "verdict: passed, not certified" in output


def test_pytest_without_a_backend_says_what_to_give(tmp_path):
    command = ["pytest", "--pyargs", "anydevice_conformance", "-c", os.devnull, "-q"]
    code, output = run(command, tmp_path)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert output.strip() == "ERROR: name the backend to check: --anydevice-backend TYPE"


def test_the_plugin_is_light_and_silent(tmp_path):
    (tmp_path / "test_own.py").write_text(
        "import sys\n\ndef test_own():\n"
        "    assert 'anydevice_conformance.pytest_plugin' in sys.modules\n"
        "    assert 'torch' not in sys.modules and 'anydevice' not in sys.modules\n"
    )
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = ["pytest", "-q", "-c", os.devnull, "-p", "anydevice_conformance.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "test_own.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "conformance" not in done.stdout
