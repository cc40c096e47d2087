"""A script that writes down what it was given, and launches of it in this process."""

import json
import os
import textwrap
import time

import pytest
from launching import fork_launches

from anydevice import cli
from anydevice_conformance.simulator.backend import SimulatorBackend

RECORD = """
    import json, os, pathlib, sys

    folder = pathlib.Path(os.environ["RECORD_FOLDER"])
    rank = os.environ.get("RANK", "none")
    file = folder / f"{rank}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}.json"
    file.write_text(json.dumps({
        "argv": sys.argv, "env": dict(os.environ), "name": __name__, "path": sys.path[0],
        "main": sys.modules["__main__"].__dict__ is globals(), "torch": "torch" in sys.modules,
    }))
"""

#: A script that is there until a signal comes; stubborn, it does not mind Ctrl-C.
HANGS = """
    import os, pathlib, signal, sys, time

    if sys.argv[1] == "stubborn":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    (pathlib.Path(os.environ["RECORD_FOLDER"]) / str(os.getpid())).touch()
    time.sleep(600)
"""


def wait_for(condition, what):
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def is_gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


class Launcher:
    """Launches of scripts; the launcher's own process is a fork, which takes a tenth of the time.

    (A new one, as for users: `fresh=True`, and `test_terminal.py`, `tests/cli/test_selftest.py`.)
    """

    def __init__(self, folder):
        self.folder = folder
        self.records = folder / "records"
        self.records.mkdir()

    def script(self, text, name="train.py"):
        path = self.folder / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    def run(self, *words, fresh=False):
        with pytest.MonkeyPatch.context() as patch:
            if not fresh:
                fork_launches(patch)
            return cli.main(["launch", *map(str, words)])

    def recorded(self):
        """What each process wrote, by rank and restart."""
        return {file.stem: json.loads(file.read_text()) for file in sorted(self.records.iterdir())}


@pytest.fixture
def launcher(tmp_path, monkeypatch):
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    made = Launcher(tmp_path)
    monkeypatch.setenv("RECORD_FOLDER", str(made.records))
    return made


@pytest.fixture(autouse=True)
def _no_accelerator(request, monkeypatch):
    """Another test of this process may have started the simulator."""
    if not {"sim", "simulator"} & set(request.fixturenames):
        monkeypatch.setattr(SimulatorBackend, "is_available", lambda backend: False)
