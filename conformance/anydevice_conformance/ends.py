"""How a process of the suite ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

__all__ = ["end_at_once"]


def end_at_once(code: int) -> NoReturn:
    """End as an interpreter does, but without taking it apart.

    Threads that Python knows are waited for, exit functions run, and output is written. A thread of
    a library, such as that of a collective which is still under way, may live on: it would abort
    the process if it asked for an interpreter that is being taken apart.
    """
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
