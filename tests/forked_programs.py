"""Programs in forks of a warm process (`forking.py`), as a new interpreter would run them."""

from __future__ import annotations

import atexit
import os
import pickle
import runpy
import signal
import sys
import threading
import traceback
import warnings
from pathlib import Path

__all__ = ["module", "python"]


def module(connection):
    """What `launching.WarmPython` and `anydevice_conformance.warm_client` start."""
    from anydevice_conformance import warm_server

    warm_server.keep(connection, _run_job)


def _run_job(job):
    """Run a module, or code with a worker of pytest."""
    if job["module"] == "-c":
        exec(job["arguments"][0], {"__name__": "__main__"})
    else:
        runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def python(connection):
    """What `warm.run_python` starts."""
    from forking import receive

    job = pickle.loads(receive(connection))
    child = os.fork()
    if not child:
        connection.close()
        _become(job)
    try:
        connection.sendall(pickle.dumps(_wait(child, job["timeout"])))
    finally:
        os._exit(0)


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
