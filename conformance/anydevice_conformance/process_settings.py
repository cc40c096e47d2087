"""Settings of Python, torch and the system that hold for all of a process, and are its user's."""

from __future__ import annotations

import contextlib
import decimal
import faulthandler
import locale
import logging
import multiprocessing
import socket
import sys
import threading
import warnings
from typing import Any, Final

import torch

__all__ = ["process_settings"]

_TINY: Final = torch.tensor([1e-40], device="cpu", dtype=torch.float32)


def process_settings() -> dict[str, Any]:
    """By name; ``==`` says whether each is what it was."""
    found: dict[str, Any] = {
        "whether the host computes with denormal numbers": (_TINY * 1).item() != 0.0,
        "the hooks for each call and line": (sys.gettrace(), sys.getprofile()),
        "the locale": locale.setlocale(locale.LC_ALL),
        "the logging that is off": logging.root.manager.disable,
        "the timeout of sockets": socket.getdefaulttimeout(),
        "the size of threads' stacks": threading.stack_size(),
        "the decimal context": repr(decimal.getcontext()),
        "how processes are started": multiprocessing.get_start_method(allow_none=True),
        "whether a crash shows its stacks": faulthandler.is_enabled(),
        "how libraries are loaded": _flags_of_loading(),
        "how torch shares tensors": _sharing(),
        "whether torch warns each time": torch.is_warn_always_enabled(),
        "torch's function modes": torch._C._len_torch_function_stack(),
        "torch's dispatch modes": torch._C._len_torch_dispatch_stack(),
        "which attention torch takes": _attention(),
        "whether torch uses oneDNN": torch._C._get_mkldnn_enabled(),
        "the limits of the system": _limits(),
    }
    if not _imports_since():  # a module that is imported may add what it needs
        found["the filters of warnings"] = list(warnings.filters)
        found["the finders of modules"] = list(sys.meta_path)
        found["the handlers of the root logger"] = list(logging.root.handlers)
    return found


_modules: list[int] = [0]


def _imports_since() -> bool:
    """Whether modules were imported since this was asked last."""
    before, _modules[0] = _modules[0], len(sys.modules)
    return before != _modules[0]


def _flags_of_loading() -> int | None:
    return sys.getdlopenflags() if hasattr(sys, "getdlopenflags") else None


def _sharing() -> str:
    multiprocessing_of_torch: Any = torch.multiprocessing
    return str(multiprocessing_of_torch.get_sharing_strategy())


def _attention() -> tuple[bool, ...]:
    flags: Any = torch.backends.cuda
    return flags.flash_sdp_enabled(), flags.mem_efficient_sdp_enabled(), flags.math_sdp_enabled()


def _limits() -> dict[str, Any]:
    with contextlib.suppress(ImportError):
        import resource

        return {
            name: resource.getrlimit(getattr(resource, name))
            for name in ("RLIMIT_NOFILE", "RLIMIT_CORE", "RLIMIT_STACK", "RLIMIT_AS")
        }
    return {}
