"""What belongs to the whole process, and is its user's: environment, signals, processors."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import os
import random
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Final

import torch

from anydevice_conformance.process_settings import process_settings

__all__ = ["differences_in_process", "process_state"]


_SIGNALS: Final = sorted(map(int, signal.valid_signals()))
#: `signal.getsignal` without its enums, which take nine tenths of a call of `process_state`.
_HANDLER: Final = inspect.unwrap(signal.getsignal)


def process_state() -> dict[str, Any]:
    """By name; ``==`` says whether each is what it was."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    found: dict[str, Any] = {
        "the environment variables": environment,
        "the working directory": _folder(),
        "the handlers of signals": [_HANDLER(one) for one in _SIGNALS],
        "the level of the root logger": logging.getLogger().level,
        "the output": (sys.stdout, sys.stderr),
        "when garbage is collected": gc.get_threshold(),
        "how often threads take turns": sys.getswitchinterval(),
        "how torch prints": vars(torch._tensor_str.PRINT_OPTS),
        "torch's number of threads between operators": torch.get_num_interop_threads(),
        "Python's random numbers": random.getstate(),
        "the hooks for errors": (sys.excepthook, threading.excepthook),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "garbage collection": gc.isenabled(),
        "the search path of modules": list(sys.path),
        "the limit of recursion": sys.getrecursionlimit(),
    }
    found.update(process_settings())
    if hasattr(os, "sched_getaffinity"):
        found["the processors it may run on"] = os.sched_getaffinity(0)
        found["its priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    with contextlib.suppress(OSError):
        status = Path("/proc/self/status").read_text()
        found["the mask of new files"] = re.findall(r"^Umask:\s*(\w+)", status, re.MULTILINE)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        found["numpy's random numbers"] = (state[0], state[1].tobytes(), *state[2:])
    return found


def _folder() -> str | None:
    """Where the process works; None where that was removed."""
    try:
        return os.getcwd()
    except OSError:
        return None


def differences_in_process(before: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    after = process_state()
    return [name for name, value in before.items() if after.get(name, value) != value]
