"""What each process of a launch runs: the user's script, as ``python script.py`` would.

It differs in one thing: of the processes that fail, the first shows its traceback, and the others,
which as a rule fail because of it, are silent. (``--debug`` shows all.) It imports no torch.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import os
import runpy
import signal
import sys
import types
from pathlib import Path
from typing import Final

from anydevice.text import says_yes

__all__ = ["FAILED", "REPORT_FOLDER", "main"]

#: The variable that names the folder in which the first process to fail leaves its rank.
REPORT_FOLDER: Final = "ANYDEVICE_LAUNCH_REPORT"
#: The file in it: ``RANK EXIT_CODE``.
FAILED: Final = "failed"


def main(words: list[str]) -> None:
    """Run ``[--module] SCRIPT ARGUMENTS...`` as the main module."""
    module = words[0] == "--module"
    target, *arguments = words[1:] if module else words
    sys.argv = [target, *arguments]
    try:
        if module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        elif Path(target).is_dir() or target.endswith((".zip", ".pyz")):
            runpy.run_path(target, run_name="__main__")
        else:
            _run_file(target)
    except SystemExit as stopped:
        if stopped.code not in (None, 0):
            _is_first(stopped.code & 0xFF if isinstance(stopped.code, int) else 1)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:  # noqa: BLE001 - whatever the script raises ends it
        # Another process that fails now has the launcher end this one, which is still to say why.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if _is_first(1) or _shows_all():
            error.__traceback__ = _of_the_script(error.__traceback__)
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stderr.flush()
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        sys.exit(1)


def _run_file(target: str) -> None:
    """Execute a file in a new ``__main__``, with the folder of the file first on the path."""
    path = os.path.abspath(target)
    if not sys.flags.safe_path if hasattr(sys.flags, "safe_path") else True:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=target,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", target),
        __spec__=None,
    )
    code = compile(Path(path).read_bytes(), target, "exec", dont_inherit=True)
    # What the script leaves behind (threads, exit handlers) needs the module after this returns.
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _of_the_script(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without the frames of this file and of ``runpy`` at its top."""
    own = (__file__, runpy.__file__)
    part = trace
    while part is not None and (
        part.tb_frame.f_code.co_filename in own
        or part.tb_frame.f_code.co_filename == "<frozen runpy>"
    ):
        part = part.tb_next
    return part or trace


def _is_first(code: int) -> bool:
    """Note that this process fails; return whether it is the first of this machine and round."""
    folder = os.environ.get(REPORT_FOLDER)
    if not folder:
        return True
    turn = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    file = Path(folder) / f"{FAILED}-{turn}"
    try:
        with file.open("x") as report:
            report.write(f"{os.environ.get('RANK', '0')} {code}")
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def _shows_all() -> bool:
    return says_yes(os.environ.get("ACCELERATE_DEBUG_MODE", ""))


if __name__ == "__main__":
    main(sys.argv[1:])
