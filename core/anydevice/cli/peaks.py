"""The most memory that each device, and the process, has used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from anydevice import registry
from anydevice.cli.text import size_text

__all__ = ["peak_rows", "reset_peaks"]


def reset_peaks() -> None:
    """Begin to count each device's peak memory."""
    for device in registry.available_devices():
        try:
            registry.get_backend(device).reset_peak_memory(device.index or 0)
        except NotImplementedError:  # this device keeps no count: `peak_rows` says so
            continue


def peak_rows() -> Iterator[tuple[str, str]]:
    """Each device with its peak memory, for a table."""
    for device in registry.available_devices():
        try:
            peak = registry.get_backend(device).peak_memory_allocated(device.index or 0)
        except NotImplementedError:
            yield str(device), "not counted by the device"
        else:
            yield str(device), size_text(peak)
    yield f"process (pid {os.getpid()})", f"{size_text(_peak_rss())} resident"


def _peak_rss() -> int | None:
    """The process's peak resident memory in bytes; mapped weights count while they are in RAM."""
    import psutil

    info = psutil.Process().memory_info()
    peak = getattr(info, "peak_wset", None)
    if peak is not None:
        return int(peak)
    try:
        import resource
    except ImportError:
        return int(info.rss)
    factor = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * factor
