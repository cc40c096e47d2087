"""Binding a process to the processors near its device."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

from anydevice import registry
from anydevice.errors import OptionError
from anydevice.processes import setting
from anydevice.text import says_yes

__all__ = ["override_numa_affinity", "set_numa_affinity"]

_logger = logging.getLogger(__name__)
_NODES = Path("/sys/devices/system/node")


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Bind this process to the processors of the NUMA node nearest to its device.

    Nothing happens where the device's node is not known, or the system cannot bind.

    Args:
        local_process_index: the rank among the processes of this machine.
        verbose: log the processors; None: where ``ACCELERATE_DEBUG_MODE`` is set.

    Raises:
        OptionError: the index is negative.
        UnknownDeviceError: there is no device for that process.

    Example:
        >>> from anydevice.utils import override_numa_affinity
        >>> override_numa_affinity(0)
    """
    if local_process_index < 0:
        raise OptionError(f"local_process_index={local_process_index}: give 0 or more")
    kind = registry.primary_type()
    if kind is None or not hasattr(os, "sched_setaffinity"):
        return
    backend = registry.get_backend(kind)
    node = backend.numa_node(backend.local_device(local_process_index))
    processors = _processors_of(node) & os.sched_getaffinity(0) if node is not None else set()
    if not processors:
        return
    os.sched_setaffinity(0, processors)
    if verbose or (verbose is None and says_yes(setting("DEBUG_MODE"))):
        _logger.warning(
            "process %d is bound to NUMA node %d, processors %s",
            local_process_index,
            node,
            sorted(processors),
        )


@functools.cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """As `override_numa_affinity`, once: a second call with the same arguments does nothing.

    Args:
        local_process_index: the rank among the processes of this machine.
        verbose: log the processors; None: where ``ACCELERATE_DEBUG_MODE`` is set.

    Raises:
        OptionError: the index is negative.
        UnknownDeviceError: there is no device for that process.

    Example:
        >>> from anydevice.utils import set_numa_affinity
        >>> set_numa_affinity(0)
    """
    override_numa_affinity(local_process_index, verbose)


def _processors_of(node: int) -> set[int]:
    """The numbers in a list such as ``0-3,8``; none where it cannot be read."""
    try:
        text = (_NODES / f"node{node}" / "cpulist").read_text().strip()
    except OSError:
        return set()
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
