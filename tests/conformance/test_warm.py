"""The process that the suite's processes are forked from."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
from warm import add_plugin_of_torch

from anydevice_conformance import warm

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks on Linux only")

PROGRAM = """
import json, os, signal, sys, warnings
import torch
from anydevice.registry import discovery

def say(**words):
    print(json.dumps(words), flush=True)

word = sys.argv[1]
if word == "look":
    say(
        parent=os.getppid(),
        folder=os.getcwd(),
        variable=os.environ.get("A_VARIABLE"),
        backends=[m for m in sys.modules if m.startswith("anydevice_backends")],
        device=torch._C._get_privateuse1_backend_name(),
        plugin=[m for m in sys.modules if m == "a_plugin_of_torch"],
    )
elif word == "echo":
    for line in sys.stdin:
        say(heard=line.strip())
elif word == "exit":
    print("on stderr", file=sys.stderr)
    sys.exit(3)
elif word == "raise":
    raise KeyError("a fault")
elif word == "die":
    os.kill(os.getpid(), signal.SIGKILL)
elif word == "wait":
    signal.pause()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a program, and with a package that torch loads by itself."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "a_program.py").write_text(PROGRAM)
    add_plugin_of_torch(folder, "a_plugin_of_torch", "def load():\n    pass\n")
    return folder


@pytest.fixture(scope="module", autouse=True)
def _warm(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("_ANYDEVICE_WARM_PROCESS", raising=False)
        patch.setenv("PYTHONPATH", str(folder))
        with warm.process():
            yield


def run(word, **options):
    child = warm.start("a_program", [word], **options)
    out, err = child.communicate(timeout=60)
    return child.returncode, out, err


def test_a_fork_is_as_good_as_new(folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("A_VARIABLE", "set late")
    code, out, err = run("look")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert found["parent"] != os.getpid()  # it was forked elsewhere
    assert found["folder"] == str(folder)
    assert found["variable"] == "set late"
    assert found["backends"] == []
    assert found["device"] == "privateuseone"


def test_a_new_interpreter_where_one_is_asked_for():
    code, out, _ = run("look", fresh=True)
    assert code == 0
    assert json.loads(out)["parent"] == os.getpid()


@pytest.mark.parametrize("load", ["1", "0"])
def test_what_torch_loads_by_itself_is_loaded_in_the_fork(load, monkeypatch):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", load)
    assert json.loads(run("look")[1])["plugin"] == ["a_plugin_of_torch"] * int(load)


def test_python_finds_what_the_fork_is_told_to_find(tmp_path, monkeypatch):
    (tmp_path / "another.py").write_text("import sys\nprint(sys.path[1])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    child = warm.start("another", [])
    assert child.communicate(timeout=60) == (f"{tmp_path}\n", "")
    assert run("look")[0] == 1  # that program is no longer there


def test_it_is_spoken_to_line_by_line():
    child = warm.start("a_program", ["echo"])
    for word in ("one", "two"):
        child.stdin.write(word + "\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == {"heard": word}
    assert child.poll() is None
    assert child.communicate("three\n", timeout=60) == ('{"heard": "three"}\n', "")
    assert child.poll() == child.wait() == 0


@pytest.mark.parametrize(
    ("word", "code", "words"),
    [("exit", 3, "on stderr"), ("raise", 1, "KeyError: 'a fault'"), ("die", -signal.SIGKILL, "")],
)
def test_how_it_ends(word, code, words):
    found, _, err = run(word)
    assert found == code
    assert words in err


def test_one_that_hangs_is_killed():
    child = warm.start("a_program", ["wait"])
    with pytest.raises(subprocess.TimeoutExpired):
        child.communicate(timeout=0.1)
    child.kill()
    assert child.communicate() == ("", "")
    assert child.returncode == -signal.SIGKILL


def test_all_that_it_writes_goes_to_a_file(tmp_path):
    with (tmp_path / "log").open("wb") as file:
        child = warm.start("a_program", ["exit"], output=file)
        assert child.wait() == 3
    assert (tmp_path / "log").read_text() == "on stderr\n"


def test_where_it_has_ended_a_new_interpreter_is_started(monkeypatch, tmp_path):
    monkeypatch.setenv("_ANYDEVICE_WARM_PROCESS", str(tmp_path / "nothing"))
    assert json.loads(run("look")[1])["parent"] == os.getpid()
