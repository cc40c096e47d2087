"""Fresh interpreters for tests, started fast: they are forked from one that has torch imported.

    from warm import run_python

    done = run_python("-W", "error", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\\n")

Nothing is imported there but torch and what a caller names, so a program finds no plugin, no
simulator and no device that an earlier one left. A test about importing itself starts
`sys.executable`. Tests find this file since `tests/conftest.py` puts the folder on the path.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import forking

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


def run_python(
    *arguments, cwd=None, env=None, check=False, timeout=120, finalize=False, imports=()
):
    """Run a program as ``subprocess.run([sys.executable, *arguments])`` does, with text captured.

    Args:
        *arguments: ``-W ACTION`` any number of times, then ``-c CODE``, ``-m MODULE`` or a script,
            then the program's own.
        cwd: where it runs.
        env: its whole environment; None for this process's.
        check: raise where it fails.
        timeout: in seconds, after which it is killed and `subprocess.TimeoutExpired` raised.
        finalize: whether the interpreter takes itself apart at the end, as a new one does.
        imports: modules that are there already, besides torch: those of transformers take seconds.
    """
    command = [str(argument) for argument in arguments]
    job = {"arguments": command, "cwd": str(cwd or Path.cwd()), "timeout": timeout}
    job["finalize"] = finalize
    with tempfile.TemporaryDirectory() as folder:
        job |= {"stdout": f"{folder}/stdout", "stderr": f"{folder}/stderr"}
        job["environment"] = dict(os.environ if env is None else env)
        code = forking.ask(forking.node(imports), "python", job)
        stdout, stderr = (Path(job[name]).read_text("utf-8") for name in ("stdout", "stderr"))
    if code is None:
        raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
    if check and code:
        raise AssertionError(f"{command} ended with {code}:\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, code, stdout, stderr)
