"""Scripts that fail, hang or are killed, and signals to the launcher."""

import os
import re
import signal
import threading

import pytest

from .conftest import HANGS, RECORD, is_gone, wait_for

# With the other tests of several processes: one worker has the process that forks them.
pytestmark = pytest.mark.xdist_group("distributed")

#: Rank 1 does it; rank 0 waits, or fails after it because of it.
FAILURES = """
    import os, pathlib, signal, sys, time

    how, after = sys.argv[1:]
    mark = pathlib.Path(os.environ["RECORD_FOLDER"]) / "failed"
    if os.environ["RANK"] == "1":
        mark.touch()
        if how == "raise":
            raise ValueError("the first")
        elif how == "exit":
            sys.exit(3)
        os.kill(os.getpid(), signal.SIGKILL)
    said = pathlib.Path(os.environ["ANYDEVICE_LAUNCH_REPORT"]) / "failed-0"
    while not (said if after == "fails" else mark).exists():
        time.sleep(0.01)
    if after == "fails":
        raise RuntimeError("connection closed by peer")
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "after", "code", "words"),
    [
        ("raise", "fails", 1, "rank 1 .* exited with code 1"),
        ("exit", "waits", 3, r"rank 1 .* exited with code 3\."),
        ("kill", "waits", 137, r"rank 1 .* was ended by signal 9 \(SIGKILL\)"),
    ],
)
def test_a_script_that_fails(launcher, capfd, how, after, code, words):
    script = launcher.script(FAILURES)
    assert launcher.run("--cpu", "--num_processes", 2, script, how, after) == code
    error = capfd.readouterr().err
    assert re.search(words, error), error
    assert error.count("Traceback") == (how == "raise")
    assert error.count("ValueError: the first") == (how == "raise")
    assert "connection closed" not in error
    assert "worker.py" not in error
    assert "ChildFailedError" not in error


def test_a_script_is_started_anew(launcher, capfd):
    text = (
        RECORD + "\n    if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0': raise OSError('lost')\n"
    )
    assert launcher.run("--cpu", "--max_restarts", 1, launcher.script(text)) == 0
    assert list(launcher.recorded()) == ["0-0", "0-1"]
    assert "OSError: lost" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "signals", "code"),
    [
        ("willing", [signal.SIGTERM], 128 + signal.SIGTERM),
        ("stubborn", [signal.SIGINT, signal.SIGHUP], 128 + signal.SIGKILL),
    ],
)
def test_a_signal_ends_all(launcher, capfd, kind, signals, code):
    """One is passed on; a second ends everything. (Ctrl-C: `test_terminal.py`.)"""
    records = launcher.records

    def send():
        wait_for(lambda: len(list(records.iterdir())) == 2, "the processes never came")
        for number in signals:
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    found = launcher.run("--cpu", "--num_processes", 2, launcher.script(HANGS), kind)
    sender.join()
    assert found == code
    for file in records.iterdir():
        wait_for(lambda pid=int(file.name): is_gone(pid), "a process lives on")
    error = capfd.readouterr().err
    assert error.count("ending the script's processes") == 1
    assert "Traceback" not in error
