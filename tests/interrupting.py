"""Interrupts at a chosen line, for tests that a call leaves nothing half-done."""

import linecache
import os
import sys

import anydevice

ROOT = os.path.dirname(anydevice.__file__)


class Interrupt(BaseException):
    """What arrives."""


class AtLine:
    """Counts the lines of a folder that this thread runs in a call; raises at one of them."""

    def __init__(self, at=None, folder=ROOT):
        self.count, self.at, self.place = 0, at, None
        self._folder = folder
        self._open = set()

    def during(self, function):
        """Call a function; return the interrupt that came out of it."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            function()
        except Interrupt as error:
            return error.with_traceback(None)  # whose frames hold models
        finally:
            sys.settrace(before)
        return None

    def _trace(self, frame, event, _argument):
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line" and not self._ends_with_statement(frame):
            self.count += 1
            if self.count == self.at:
                self.place = (frame.f_code.co_filename, frame.f_lineno)
                raise Interrupt
        return self._trace

    def _ends_with_statement(self, frame):
        """Python names the line of a ``with`` once more at its end, where no interrupt arrives."""
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if not line.startswith("with "):
            return False
        key = (id(frame), frame.f_lineno)
        begins = key not in self._open
        self._open ^= {key}
        return not begins
