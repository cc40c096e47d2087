"""A process that was forked from the warm one, as its starter sees it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO

__all__ = ["Forked"]


class Forked:
    """What the suite uses of `subprocess.Popen`.

    Raises:
        OSError: the warm process has ended.
    """

    stdin: IO[str] | None = None
    stdout: IO[str] | None = None
    stderr: IO[str] | None = None

    def __init__(
        self,
        path: str,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: IO[bytes] | None,
    ) -> None:
        self.returncode: int | None = None
        self._readers: list[threading.Thread] = []
        self._written: dict[str, str] = {}
        self._socket = socket.socket(socket.AF_UNIX)
        job = {
            "module": module,
            "arguments": list(arguments),
            "environment": dict(environment),
            "folder": os.getcwd(),
        }
        with contextlib.ExitStack() as theirs:
            theirs.callback(self._close_unless_started)
            self._socket.connect(path)
            descriptors = self._pipes(theirs) if output is None else _to_file(output, theirs)
            socket.send_fds(self._socket, [b"."], descriptors)
            self._socket.sendall(json.dumps(job).encode() + b"\n")
            self._answers = self._socket.makefile("r")
            self.pid = int(self._answers.readline() or 0)
            if not self.pid:
                raise ConnectionError("the warm process has ended")

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; returns the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
            self.returncode = int(self._answers.readline() or -signal.SIGKILL)
            self._answers.close()
            self._socket.close()
        return self.returncode

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write to it, and read until its end; what it wrote to each pipe.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        assert self.stdin is not None
        if not self._readers:
            self._readers = [
                threading.Thread(target=self._read, args=(name,), daemon=True)
                for name in ("stdout", "stderr")
            ]
            for reader in self._readers:
                reader.start()
            with contextlib.suppress(BrokenPipeError):
                self.stdin.write(text or "")
                self.stdin.close()
        self.wait(timeout)
        for reader in self._readers:
            reader.join()
        return self._written["stdout"], self._written["stderr"]

    def _read(self, name: str) -> None:
        with getattr(self, name) as file:
            self._written[name] = file.read()

    def _pipes(self, theirs: contextlib.ExitStack) -> list[int]:
        (child_in, mine_in), (mine_out, child_out), (mine_err, child_err) = (
            os.pipe() for _ in range(3)
        )
        for descriptor in (child_in, child_out, child_err):
            theirs.callback(os.close, descriptor)
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(mine_in, "w"),
            os.fdopen(mine_out),
            os.fdopen(mine_err),
        )
        return [child_in, child_out, child_err]

    def _close_unless_started(self) -> None:
        if not getattr(self, "pid", 0):
            self._socket.close()
            for file in (self.stdin, self.stdout, self.stderr):
                if file is not None:
                    file.close()


def _to_file(output: IO[bytes], theirs: contextlib.ExitStack) -> list[int]:
    nothing = os.open(os.devnull, os.O_RDONLY)
    theirs.callback(os.close, nothing)
    return [nothing, output.fileno(), output.fileno()]
