"""The warm process: ``python -m anydevice_conformance.warm_server SOCKET``; ends with its input.

Each connection brings three descriptors and one line of JSON, and is told the fork's process id and
then its exit code, a line each.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn

from anydevice_conformance.ends import end_at_once

__all__ = ["PRELOADED", "keep", "main", "serve"]

#: What the suite's processes import, and touches no device. Each optimizer imports dynamo.
PRELOADED: Final = (
    "torch._dynamo",
    "pytest",
    "hypothesis",
    "psutil",
    "anydevice.registry",
    "anydevice_conformance.session",
    "anydevice_conformance.ranks",
)


def main() -> None:
    """Listen, import, and fork for whoever asks, until the input ends."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(16)
    print("listening", flush=True)
    gc.disable()  # imports leave no garbage, and a fifth of their time goes to looking for it
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy the pages of all that it looks at
    gc.enable()
    serve(listener)


def serve(listener: socket.socket) -> None:
    """Fork for whoever connects, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: the one that started it ends it
    signal.signal(signal.SIGCHLD, _reap)
    while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
        connection = listener.accept()[0]
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            keep(connection)
        connection.close()


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _run(job: Mapping[str, Any]) -> None:
    runpy.run_module(job["module"], run_name="__main__", alter_sys=True)


def keep(connection: socket.socket, run: Callable[[Mapping[str, Any]], object] = _run) -> NoReturn:
    """Fork once more, for the job, and say how that ends.

    Args:
        connection: to who wants it.
        run: what the job does, given it; as ``python -m`` does.
    """
    try:
        descriptors = socket.recv_fds(connection, 1, 3)[1]
        job = json.loads(connection.makefile().readline())
        child = os.fork()
        if child == 0:
            connection.close()
            _become(job, descriptors, run)
        for descriptor in (*descriptors, 0, 1, 2):
            os.close(descriptor)
        connection.sendall(f"{child}\n".encode())
        threading.Thread(target=_end_with, args=(connection, child), daemon=True).start()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{code}\n".encode())
    finally:
        os._exit(0)


def _end_with(connection: socket.socket, child: int) -> None:
    """End the job once nobody waits for it."""
    connection.recv(1)
    os.kill(child, signal.SIGKILL)


def _become(
    job: Mapping[str, Any],
    descriptors: list[int],
    run: Callable[[Mapping[str, Any]], object],
) -> NoReturn:
    """Be the new program."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
        for descriptor in set(descriptors):
            os.close(descriptor)
        own = dict(os.environ)
        os.environ.clear()
        os.environ.update(job["environment"])
        os.chdir(job["folder"])
        sys.path[: 1 + len(_paths(own))] = [job["folder"], *_paths(os.environ)]
        sys.argv = [job["module"], *job["arguments"]]
        _load_plugins_of_torch()
        run(job)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - told as an interpreter tells it
        traceback.print_exc()
    finally:
        end_at_once(code)


def _paths(environment: Mapping[str, str]) -> list[str]:
    return [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]


def _load_plugins_of_torch() -> None:
    """What ``import torch`` would have done here with this environment."""
    torch: Any = importlib.import_module("torch")
    wanted = getattr(torch, "_is_device_backend_autoload_enabled", None)
    if wanted is not None and wanted():
        torch._import_device_backends()


if __name__ == "__main__":
    main()
