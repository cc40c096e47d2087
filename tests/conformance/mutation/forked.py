"""Children of the checks as forks: a new interpreter imports torch for two seconds.

Tasks that do not ask what a new process is like are forks of the trial; the others are forks of the
warm process, which has touched no device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Final

from anydevice_conformance import children, warm

__all__ = ["start", "use_warm_process"]

_FORKED: Final = ("collective", "count", "hold")
_HERE: Final = str(Path(__file__).parents[1])
_spawned = children.start
_warm: dict[str, str] = {}


def use_warm_process() -> None:
    """Have tasks that need a new process be forks of the warm process that there is now."""
    _warm.update({k: v for k, v in os.environ.items() if k == warm._VARIABLE})


def start(
    task: str, device_type: str, environment: dict[str, str] | None = None, **args: Any
) -> Any:
    """As `children.start`."""
    if task not in _FORKED:
        if environment or not _warm:  # a library may read its variables as it is loaded
            return _spawned(task, device_type, environment, **args)
        words = [task, device_type, json.dumps(args)]
        path = os.pathsep.join(filter(None, [_HERE, os.environ.get("PYTHONPATH")]))
        here = {**os.environ, **_warm, "PYTHONPATH": path}
        return warm.start("mutation.anew", words, environment=here)
    return _Forked(task, device_type, environment or {}, args)


class _Forked:
    """What the suite uses of `subprocess.Popen`."""

    def __init__(
        self, task: str, device_type: str, environment: dict[str, str], args: dict[str, Any]
    ) -> None:
        (child_in, mine_in), (mine_out, child_out), (mine_err, child_err) = (
            os.pipe() for _ in range(3)
        )
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in (mine_in, mine_out, mine_err):
                os.close(descriptor)
            for number, descriptor in enumerate((child_in, child_out, child_err)):
                os.dup2(descriptor, number)
            _run(task, device_type, environment, args)
        for descriptor in (child_in, child_out, child_err):
            os.close(descriptor)
        self.stdin = os.fdopen(mine_in, "w")
        self.stdout = os.fdopen(mine_out)
        self.stderr = os.fdopen(mine_err)

    def communicate(self, text: str | None = None, timeout: float | None = None) -> Any:
        """As of a process: what it wrote, once it has ended."""
        if text:
            self.stdin.write(text)
        self.stdin.close()
        out = self.stdout.read()
        err = self.stderr.read()
        self.wait()
        return out, err

    def kill(self) -> None:
        """End it."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Its code."""
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _run(task: str, device_type: str, environment: dict[str, str], args: dict[str, Any]) -> None:
    code = 1
    try:
        os.environ.update(environment)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
        print(json.dumps(children._TASKS[task](device_type, **args)), flush=True)
        code = 0
    except BaseException:  # noqa: BLE001 - the child must not return to its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
