"""Whether another process of this host lives."""

from __future__ import annotations

import os
import socket
from pathlib import Path

__all__ = ["has_died", "this_process"]


def this_process() -> str:
    """A name of this process that others can ask `has_died` about."""
    return f"{socket.gethostname()}:{os.getpid()}"


def has_died(process: str) -> bool:
    """Whether a process of this host has ended; False for one of another host."""
    host, _, pid = process.rpartition(":")
    return host == socket.gethostname() and not _is_alive(int(pid))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # a zombie has died, and waits to be reaped
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return state.rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True
