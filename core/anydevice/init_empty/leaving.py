"""Taking torch's modes off again, also where an interrupt cuts short what should have done so.

An interrupt can come between any two instructions, also inside ``finally`` and ``__exit__``. What
undoes a step here may therefore be done twice, and is: the second time it finishes the first.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Entered", "finish_contexts"]


def finish_contexts(error: BaseException) -> None:
    """End contexts that an interrupt has left open, which the frames of its traceback hold.

    torch takes a function mode off its stack, and puts it back, by such a context: it would put it
    back when the traceback is forgotten, after all else has left.
    """
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == contextlib.__file__:
            with contextlib.suppress(RuntimeError):  # one that is still running
                step.tb_frame.clear()
        step = step.tb_next


class Entered:
    """A function mode above a dispatch mode, and what torch notes of such modes.

    Args:
        dispatch: the dispatch mode.
        function: the function mode.
    """

    def __init__(self, dispatch: TorchDispatchMode, function: TorchFunctionMode) -> None:
        self._dispatch, self._function = dispatch, function
        self._flags = {n: v for n, v in vars(_python_dispatch).items() if n.startswith("_is_in_")}

    def enter(self) -> None:
        """Put the modes on their stacks."""
        self._dispatch.__enter__()  # type: ignore[no-untyped-call]
        self._function.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Take them off, as far as they are there. May be called again."""
        above = []
        while any(mode is self._function for mode in _get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
            above.append(torch._C._pop_torch_function_stack())
        for mode in reversed(above):
            if mode is not self._function:  # one that was set in between, to stay
                torch._C._push_on_torch_function_stack(mode)
        taken: list[Any] = []
        while any(
            mode is self._dispatch for mode in _python_dispatch._get_current_dispatch_mode_stack()
        ):
            taken.append(torch._C._pop_torch_dispatch_stack(None))
        for mode in reversed(taken):
            if mode is not self._dispatch:
                torch._C._push_on_torch_dispatch_stack(mode)
        vars(_python_dispatch).update(self._flags)
