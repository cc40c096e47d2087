"""Work that no interrupt stops half-way.

[Note: where interrupts land]
Ctrl-C, the handler of a signal, an exception that another thread raises in this one: each can come
between any two instructions, also inside ``finally`` and ``__exit__``. So code in the thread that
an interrupt reaches cannot promise to finish what it began. Work that changes a model or files in
several steps therefore runs in a thread of its own, which nothing interrupts, while the caller
waits. An interrupt makes the work stop at its next `check`; it cleans up as after any error, and
the interrupt is raised when it has ended.
"""

from __future__ import annotations

import _thread
import contextvars
import math
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

__all__ = ["Interrupted", "check", "forget_frames", "stopper", "uninterrupted"]

T = TypeVar("T")

#: Seconds that an interrupt waits for the work to stop, which checks for it every few milliseconds.
_PATIENCE: Final = 60.0
#: Seconds after which a thread that waits looks for interrupts, where the system does not wake it.
_LOOK: Final = 0.5


class Interrupted(BaseException):
    """Raised in work whose caller was interrupted. Its arguments are added to the interrupt's."""


class _Current(threading.local):
    work: _Work[Any] | None = None


_current: Final = _Current()


class _Work(Generic[T]):
    """One call of `uninterrupted`."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._thread = threading.Thread(target=self._run, name="anydevice-work", daemon=True)
        self._context = contextvars.copy_context()
        self._begun = _thread.allocate_lock()  # taken by the thread, or by who does not want it
        self._has_ended = False
        self._end = _thread.allocate_lock()  # free once it has ended
        self._end.acquire()
        self.stopped = False
        self.result: T | None = None
        self.error: BaseException | None = None

    def start(self) -> None:
        """Start the thread, from a third one: an interrupt must not split this."""
        _thread.start_new_thread(self._thread.start, ())

    def _run(self) -> None:
        try:
            if not self._begun.acquire(blocking=False):
                return
            _current.work = self
            assert self._function is not None
            self.result = self._context.run(self._function)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            self.error = error
        finally:
            self._function = None
            self._has_ended = True
            self._end.release()

    def wait(self, seconds: float = math.inf) -> None:
        """Wait for the end, and no longer than ``seconds``. An interrupt is raised at once."""
        limit = time.monotonic() + seconds
        while not self._has_ended and time.monotonic() < limit:
            self._end.acquire(timeout=_LOOK)
        if self._has_ended:
            self._thread.join()

    def stop(self) -> None:
        """Make it end at its next `check`, and wait for that."""
        self.stopped = True
        if not self._begun.acquire(blocking=False):
            self.wait(_PATIENCE)
            return
        # It will do nothing; but if the system was asked for the thread, see that one end.
        limit = time.monotonic() + _LOOK
        while not self._has_ended and time.monotonic() < limit:
            time.sleep(0.001)
        self.wait(0)


def uninterrupted(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, and wait for it.

    The function sees none of torch's modes of the calling thread (``inference_mode``, ``no_grad``,
    a default device), and its tensors are ordinary ones. Inside of another call of this function
    it is called directly.

    Raises:
        BaseException: what the function raised, with empty frames: an error that is kept keeps no
            tensor alive. An interrupt of the caller is raised as it is, after the function has
            returned or raised.

    Example:
        >>> uninterrupted(lambda: 1 + 1)
        2
    """
    if _current.work is not None:
        return function()
    work = _Work(function)
    try:
        work.start()
        work.wait()
    except BaseException as interrupt:
        work.stop()
        if isinstance(work.error, Interrupted):
            interrupt.args = (*interrupt.args, *work.error.args)
        work.result = work.error = None
        raise
    if work.error is not None:
        forget_frames(work.error)
        try:
            raise work.error
        finally:
            del work  # whose error refers to this frame
    return work.result  # type: ignore[return-value]


def check() -> None:
    """Raise `Interrupted` when the caller of this thread's work was interrupted."""
    if _current.work is not None and _current.work.stopped:
        raise Interrupted


def stopper() -> Callable[[], bool]:
    """A function that tells any thread whether this thread's work shall stop."""
    work = _current.work
    return lambda: work is not None and work.stopped


def forget_frames(error: BaseException) -> None:
    """Drop the local variables of all frames that an error and its causes refer to."""
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:
        found = errors.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            errors += [found.__cause__, found.__context__]
