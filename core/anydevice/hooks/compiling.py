"""``torch.compile`` and hooks: a module's own forward is compiled, and what hooks do is not.

While a hook works, the compiler is suspended for the thread; for the module's own forward it is
resumed. So a call of a hooked module is a graph break around a forward that is compiled, and the
code of hooks, of the transfer engine and of backends is never traced. A forward that runs aligned
(`anydevice.hooks.cross_device`) is not compiled either, but modules that it calls are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from anydevice.hooks.cross_device import is_aligned
from anydevice.hooks.types import Args, Forward, Kwargs

__all__ = ["current_compiler", "is_compiling", "never_traced", "run_outside_graph", "thread"]

_Function = TypeVar("_Function", bound=Callable[..., Any])
_frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
#: The compiler that is at work in the calling thread; None without one.
current_compiler: Callable[[], Any] = getattr(_frames, "get_eval_frame_callback", lambda: None)

#: Whether the compiler is tracing the code that asks.
is_compiling = torch.compiler.is_compiling


class _Thread(threading.local):
    suspended: Any = None  # the compiler of this thread, while hooks work


thread = _Thread()


def never_traced(function: _Function) -> _Function:
    """Mark a function: the compiler breaks its graph at a call of it, and does not compile it.

    Unlike with `torch.compiler.disable`, what it calls may be compiled, and the compiler is not
    imported for it.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    if hasattr(_frames, "_FrameExecStrategy"):
        action = _frames._FrameAction
        strategy = _frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        _frames.set_code_exec_strategy(function.__code__, strategy)
    return function


@never_traced
def run_outside_graph(
    run: Callable[..., Any], module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs
) -> Any:
    """Call a hook's ``run_forward`` with the compiler suspended, except in ``forward`` itself."""
    compiler, before = current_compiler(), thread.suspended
    if compiler is not None:
        thread.suspended = compiler
        _frames.set_eval_frame(None)
    try:
        return run(module, partial(_resume, forward), args, kwargs)
    finally:
        thread.suspended = before
        if compiler is not None:
            _frames.set_eval_frame(compiler)


@never_traced
def _resume(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    """Call a module's own forward with the compiler at work again."""
    if is_aligned():
        return forward(*args, **kwargs)
    before = current_compiler()
    _frames.set_eval_frame(thread.suspended)
    try:
        return forward(*args, **kwargs)
    finally:
        _frames.set_eval_frame(before)
