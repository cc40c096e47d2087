"""Run a plan, pass signals on, and leave no process behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import psutil

from anydevice.launch.agent import QUIET
from anydevice.launch.plan import LaunchPlan
from anydevice.launch.worker import REPORT_FOLDER

__all__ = ["execute"]

#: Seconds between looks at the agent.
_LOOK_S: Final = 0.05
_PASSED_ON: Final = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


def execute(plan: LaunchPlan) -> int:
    """Start the processes and wait for them.

    The first Ctrl-C (or SIGTERM, SIGHUP) is passed on to the script, which may save what it has and
    has 30 seconds to end; the second ends all processes at once.

    Returns:
        The exit code: 0, the first failing process's, or 128 and a signal's number.
    """
    with tempfile.TemporaryDirectory(prefix="anydevice-launch-") as folder:
        environment = {**os.environ, **plan.environment, REPORT_FOLDER: folder}
        if plan.settings.get("quiet"):
            environment[QUIET] = "1"
        sys.stdout.flush()
        # A session of its own: a terminal's Ctrl-C comes here only, and is passed on once.
        process = subprocess.Popen(plan.command(), env=environment, start_new_session=True)
        try:
            with _signals(process):
                # Not one long wait: a signal that another thread gets is handled here soon, too.
                while (code := process.poll()) is None:
                    time.sleep(_LOOK_S)
        except BaseException:
            _end_all(process, folder)
            raise
        if code < 0:  # the agent itself was killed, and its processes live on
            _end_all(process, folder)
        return code if code >= 0 else 128 - code


@contextlib.contextmanager
def _signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass signals on to the agent; the second one ends everything."""
    if threading.current_thread() is not threading.main_thread():  # signals go to the main thread
        yield
        return
    received = 0

    def pass_on(number: int, frame: Any) -> None:
        nonlocal received
        received += 1
        if received == 1:
            print(
                "anydevice launch: ending the script's processes (within 30 s); "
                "once more ends them at once",
                file=sys.stderr,
            )
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            return
        _kill(psutil.Process(process.pid).children(recursive=True))
        process.kill()

    before = {number: signal.signal(number, pass_on) for number in _PASSED_ON}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_all(process: subprocess.Popen[bytes], folder: str) -> None:
    """Kill the agent and every process that it started: they carry the folder's name."""
    if process.poll() is None:
        process.kill()
    found = []
    for other in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if other.environ().get(REPORT_FOLDER) == folder:
                found.append(other)
    _kill(found)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
