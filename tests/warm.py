"""Fresh interpreters for tests, started fast: they are forked from one that has torch imported.

    from warm import run_python

    done = run_python("-W", "error", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\\n")

Nothing but torch is imported there, so a program finds no plugin, no simulator and no device that
an earlier one left. A test about importing itself starts `sys.executable`. Tests find this file
since `tests/conftest.py` puts the folder on the path.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

__all__ = ["add_plugin_of_torch", "run_python"]


def add_plugin_of_torch(folder, name, code):
    """Write a package whose function ``load`` torch calls as it starts, in forks too.

    Args:
        folder: one that is on the path there.
        name: of the module.
        code: its text.
    """
    (folder / f"{name}.py").write_text(code)
    metadata = folder / f"{name}-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nplugin = {name}:load\n")


def run_python(*arguments, cwd=None, env=None, check=False, timeout=120, finalize=False):
    """Run a program as ``subprocess.run([sys.executable, *arguments])`` does, with text captured.

    Args:
        *arguments: ``-W ACTION`` any number of times, then ``-c CODE``, ``-m MODULE`` or a script,
            then the program's own.
        cwd: where it runs.
        env: its whole environment; None for this process's.
        check: raise where it fails.
        timeout: in seconds, after which it is killed and `subprocess.TimeoutExpired` raised.
        finalize: whether the interpreter takes itself apart at the end, as a new one does.
    """
    command = [str(argument) for argument in arguments]
    job = {"arguments": command, "cwd": str(cwd or Path.cwd()), "timeout": timeout}
    job["finalize"] = finalize
    with tempfile.TemporaryDirectory() as folder:
        job |= {"stdout": f"{folder}/stdout", "stderr": f"{folder}/stderr"}
        code = _server().ask({**job, "environment": dict(os.environ if env is None else env)})
        stdout, stderr = (Path(job[name]).read_text("utf-8") for name in ("stdout", "stderr"))
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
    if check and code:
        raise AssertionError(f"{command} ended with {code}:\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, code, stdout, stderr)


# ---------------------------------------------------------------------- in the test's process


class _Server:
    def __init__(self):
        self._lock = threading.Lock()
        self.owner = os.getpid()
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        atexit.register(self.close)

    def ask(self, job):
        with self._lock:
            self.process.stdin.write(json.dumps(job) + "\n")
            self.process.stdin.flush()
            return json.loads(self.process.stdout.readline())

    def close(self):
        if self.owner == os.getpid():
            self.process.stdin.close()
            self.process.wait(10)
            self.process.stdout.close()


_found = None


def _server():
    global _found
    if _found is None or _found.owner != os.getpid() or _found.process.poll() is not None:
        _found = _Server()
    return _found


# ---------------------------------------------------------------------- in the one that forks


def _serve():
    import torch

    torch.set_num_threads(1)
    torch.ones(1).sum()  # what torch sets up late is set up once
    for line in sys.stdin:
        job = json.loads(line)
        child = os.fork()
        if not child:
            _become(job)
        print(json.dumps(_wait(child, job["timeout"])), flush=True)


def _wait(child, timeout):
    """The exit code of a child, as `subprocess` has it; None where it was killed for its time."""
    expired = threading.Event()

    def kill():
        expired.set()
        os.killpg(child, signal.SIGKILL)

    timer = threading.Timer(timeout, kill)
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    timer.join()
    return None if expired.is_set() else os.waitstatus_to_exitcode(status)


def _become(job):
    """Turn a forked child into a fresh program; never returns.

    Raises:
        SystemExit: the end of a program whose interpreter is to finalize.
    """
    import torch

    os.setpgid(0, 0)
    torch.set_num_threads(1)  # renews the pool of threads, which two threads at once cannot
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.environ.clear()
    os.environ.update(job["environment"])
    os.chdir(job["cwd"])
    sys.path[1:1] = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    for name in [name for name in sys.modules if name.startswith("__mp_main__")]:
        del sys.modules[name]
    code = 0
    try:
        _run(job["arguments"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it
        traceback.print_exc()
        code = 1
    if job["finalize"]:
        raise SystemExit(code)
    threading._shutdown()  # as an interpreter does: pools of threads end, the others are joined
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments):
    arguments = list(arguments)
    while arguments[0] == "-W":
        warnings._setoption(arguments[1])  # as the interpreter's own option
        del arguments[:2]
    kind = arguments.pop(0)
    if kind == "-c":
        code = arguments.pop(0)
        sys.argv, sys.path[0] = ["-c", *arguments], ""
        exec(
            compile(code, "<string>", "exec"),
            {"__name__": "__main__", "__builtins__": __builtins__},
        )
    elif kind == "-m":
        sys.argv, sys.path[0] = arguments, os.getcwd()
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = [kind, *arguments], str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    _serve()
