"""What belongs to the whole process, and is its user's: environment, signals, processors."""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
from typing import Any

import torch

__all__ = ["differences_in_process", "process_state"]


def process_state() -> dict[str, Any]:
    """By name; ``==`` says whether each is what it was."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    found: dict[str, Any] = {
        "the environment variables": environment,
        "the working directory": os.getcwd(),
        "the handler of SIGINT": signal.getsignal(signal.SIGINT),
        "the handler of SIGTERM": signal.getsignal(signal.SIGTERM),
        "Python's random numbers": random.getstate(),
        "the hooks for errors": (sys.excepthook, threading.excepthook),
        "the precision of float32 products": torch.get_float32_matmul_precision(),
        "anomaly detection": torch.is_anomaly_enabled(),
        "garbage collection": gc.isenabled(),
        "the search path of modules": list(sys.path),
        "the limit of recursion": sys.getrecursionlimit(),
    }
    if hasattr(os, "sched_getaffinity"):
        found["the processors it may run on"] = os.sched_getaffinity(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        found["numpy's random numbers"] = (state[0], state[1].tobytes(), *state[2:])
    return found


def differences_in_process(before: dict[str, Any]) -> list[str]:
    """The names of what is not as it was."""
    after = process_state()
    return [name for name, value in before.items() if after.get(name) != value]
