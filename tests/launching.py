"""Real processes for tests, started fast: they are forked from one that has torch imported.

    from launching import run_ranks

    def step(rank, size):          # at the top level of a file; its result is pickled
        return PartialState().process_index

    assert run_ranks(step, 2, "sim") == [0, 1]

Each rank has torchrun's variables in its environment, and nothing else started. On ``"sim"`` it has
as many simulated devices as there are ranks. A function in a file without imports of pytest starts
faster. Tests find this file since `tests/conftest.py` puts the folder on the path.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import random
import select
import signal
import socket
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import forking

__all__ = ["Failed", "fork_launches", "free_port", "run_ranks", "warm_python"]


class Failed:
    """What a rank left that raised, was killed or hung.

    Attributes:
        error: the exception, where it could be brought over; else None.
        text: its traceback, and what the rank wrote to stderr.
    """

    def __init__(self, error, text):
        self.error = error
        self.text = text

    def __repr__(self):
        return f"Failed({self.error!r}):\n{self.text}"


def run_ranks(
    function, size, device_type="cpu", *args, timeout=60, check=True, environment=None, imports=()
):
    """Call ``function(rank, size, *args)`` in ``size`` processes, and return their results.

    Args:
        function: at the top level of its file.
        size: how many processes.
        device_type: ``"cpu"`` or ``"sim"``.
        *args: passed on; pickled.
        timeout: in seconds, after which those that still run are killed.
        check: raise where a rank fails; else its result is a `Failed`.
        environment: more variables; None takes one away.
        imports: modules that are imported once, before the ranks are forked, where each of them
            would import them: those of transformers take seconds. Other launches don't see them.
    """
    job = {
        "file": function.__code__.co_filename,
        "module": function.__module__,
        "function": function.__qualname__,
        "size": size,
        "device_type": device_type,
        "args": args,
        "timeout": timeout,
        "environment": environment or {},
        "path": sys.path,
    }
    answers = forking.ask(_node(imports), "ranks", job)
    results = [_load(answer) for answer in answers]
    failed = {rank: r for rank, r in enumerate(results) if isinstance(r, Failed)}
    if check and failed:
        raise AssertionError("\n".join(f"rank {rank}: {r!r}" for rank, r in failed.items()))
    return results


class WarmPython:
    """Takes the place of `subprocess.Popen` for ``python -m``: a fork, and no new interpreter."""

    returncode = None

    def __init__(self, command, env, start_new_session=False):
        python, option, module, *arguments = command
        assert (python, option) == (sys.executable, "-m"), command
        self._socket, self.pid = _start_warm(_programs(), module, arguments, env)

    def poll(self):
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self):
        if self.returncode is None:
            self.returncode = _warm_code(self._socket)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def fork_launches(patch):
    """The process that a launch starts is a fork, which takes a tenth of the time."""
    patch.setattr("anydevice.launch.execute.subprocess", SimpleNamespace(Popen=WarmPython))


def warm_python(folder, imports=()):
    """A program in a folder that runs what Python runs, in forks: torchrun's ``PYTHON_EXEC``.

    Args:
        folder: where.
        imports: as of `run_ranks`.
    """
    program = Path(folder) / "warm-python"
    text = _PROGRAM.format(here=__file__, path=_programs(imports))
    program.write_text(f"#!{sys.executable} -I\n{text}")
    program.chmod(0o755)
    return str(program)


def free_port():
    """A port that nobody uses now, and no other test meanwhile.

    Below those that the system gives to outgoing connections, and marked by a lock that this
    process holds: between this call and the port's use, nothing else takes it.
    """
    folder = Path(tempfile.gettempdir()) / f"anydevice-test-ports-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    while True:
        port = random.SystemRandom().randrange(12_000, 32_000)
        mark = (folder / str(port)).open("w")
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with socket.socket() as place:
                place.bind(("", port))
        except OSError:
            mark.close()
            continue
        _ports.append(mark)
        return port


#: The locks of `free_port`, until this process ends.
_ports = []


# ---------------------------------------------------------------------- in the test's process


#: What `warm_python` writes.
_PROGRAM = """
import os, runpy, signal, sys

sys.path.insert(0, os.path.dirname({here!r}))
launching = runpy.run_path({here!r})
unbuffered, *words = sys.argv[1:]
assert unbuffered == "-u", sys.argv
if words[0] == "-m":
    del words[0]
elif words[0] != "-c":
    words.insert(0, "anydevice.launch.worker")  # it runs a script as Python does
module, *arguments = words
socket, pid = launching["_start_warm"]({path!r}, module, arguments, os.environ)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: os.kill(pid, number))
code = launching["_warm_code"](socket)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def _start_warm(path, module, arguments, environment):
    """Start a module in a fork with this process's streams; returns the connection and its pid."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    job = {
        "module": module,
        "arguments": arguments,
        "environment": dict(environment),
        "folder": os.getcwd(),
    }
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.sendall(json.dumps(job).encode() + b"\n")
    return connection, int(_line(connection))


def _warm_code(connection):
    """Wait for a fork's end; its exit code, negative for a signal."""
    with connection:
        return int(_line(connection))


def _line(connection):
    line = b""
    while not line.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            raise AssertionError("the process that forks interpreters has died")
        line += part
    return line


def _programs(imports=()):
    """Where the process listens that forks interpreters."""
    return f"{_node(imports)}/programs"


def _node(imports):
    """The process that has imported what ranks need, and this; transformers is imported once."""
    users = ("transformers.", "peft")
    common = forking.TRANSFORMERS if any(name.startswith(users) for name in imports) else ()
    return forking.node(forking.RANKS, common, imports)


def _load(answer):
    """A rank's answer: what it returned, or why it did not."""
    kind, value, text = answer
    if kind == "result":
        import torch

        return torch.load(io.BytesIO(value), weights_only=False)
    try:
        error = pickle.loads(value) if value else None
    except Exception as problem:  # noqa: BLE001 - an error of a class that cannot be brought over
        error, text = None, f"{text}\n(not brought over: {problem})"
    return Failed(error, text)
