"""Work in another thread, and threads that get in each other's way as often as they can."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, Final, TypeVar

T = TypeVar("T")

__all__ = ["at_once", "in_thread"]

#: How often a thread pauses between two lines of the backend, and for how many seconds.
_SHARE: Final = 0.2
_PAUSE: Final = 2e-5


def at_once(work: Callable[[int], object], count: int, backend: object) -> None:
    """Call ``work(0)`` to ``work(count - 1)``, each in a thread; raise what the first one raised.

    The threads begin together. Now and then each pauses between two lines of ``backend``'s own
    code, so that a race of a few instructions is lost within a second.
    """
    together = threading.Barrier(count)
    files = {getattr(sys.modules.get(c.__module__), "__file__", "") for c in type(backend).__mro__}
    dice = random.Random(0)

    def between_lines(frame: FrameType, event: str, _argument: object) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and dice.random() < _SHARE:
            time.sleep(_PAUSE)
        return between_lines

    def begin(number: int) -> None:
        together.wait(60)
        before = sys.gettrace()
        sys.settrace(between_lines)
        try:
            work(number)
        finally:
            sys.settrace(before)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(begin, number) for number in range(count)]:
            future.result()


def in_thread(work: Callable[[], T]) -> T:
    """What ``work`` returns in another thread; what it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()
