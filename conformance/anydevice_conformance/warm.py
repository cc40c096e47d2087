"""A process that has torch imported and has touched no device: the suite's processes fork from it.

    with warm.process():
        child = warm.start("anydevice_conformance.children", ["count", "foo", "{}"])
        print(child.communicate())

A new interpreter takes seconds to import torch and what a training step imports, and a run of the
suite needs up to ten. A fork is as good as new: no plugin, no vendor's package and no device has
been touched before, and the packages that torch loads by itself (the entry-point group
``torch.backends``) are loaded in the fork. Where the system cannot fork safely, or no process is
warm, each is a new interpreter.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, Final

__all__ = ["process", "start"]

#: Names the socket at which the warm process listens, for the run and for its children.
_VARIABLE: Final = "_ANYDEVICE_WARM_PROCESS"


@contextlib.contextmanager
def process() -> Iterator[None]:
    """Have a warm process while in the context, a caller's if there is one.

    Where this system bears none, do nothing: elsewhere a process with libraries may not fork.
    """
    if not sys.platform.startswith("linux") or os.environ.get(_VARIABLE):
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "socket")
        server = subprocess.Popen(
            [sys.executable, "-m", "anydevice_conformance.warm_server", path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        )
        assert server.stdout is not None
        server.stdout.readline()  # it listens, or it has ended
        os.environ[_VARIABLE] = path
        try:
            yield
        finally:
            os.environ.pop(_VARIABLE, None)
            server.communicate()  # the end of its input is its end


def start(
    module: str,
    arguments: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    fresh: bool = False,
    output: IO[bytes] | None = None,
) -> Any:
    """Run ``python -m MODULE ARGUMENTS``; returns a `subprocess.Popen`, or what is used of one.

    Args:
        module: which.
        arguments: its own.
        environment: the whole of it; None for this process's.
        fresh: whether it must be a new interpreter: a library may read its variables as it is
            loaded.
        output: where all that it writes goes, and it reads nothing; None for a pipe each.
    """
    environment = dict(os.environ if environment is None else environment)
    path = environment.get(_VARIABLE)
    if path and not fresh:
        from anydevice_conformance.warm_client import Forked

        with contextlib.suppress(OSError):  # the warm process has ended
            return Forked(path, module, arguments, environment, output)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE if output is None else subprocess.DEVNULL,
        stdout=subprocess.PIPE if output is None else output,
        stderr=subprocess.PIPE if output is None else subprocess.STDOUT,
        env=environment,
        text=True,
    )
