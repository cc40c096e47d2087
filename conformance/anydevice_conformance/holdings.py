"""What a process holds: memory of each kind, descriptors, threads, tensors."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import psutil
import torch

from anydevice_conformance.process_state import differences_in_process, process_state
from anydevice_conformance.subject import Subject

__all__ = ["allocated", "holdings", "nothing_kept", "only_new_objects"]

#: What many calls together may leave; each of them leaves nothing.
_ALLOWED: Final = {"file descriptors": 3, "threads": 3, "tensors": 8}
_ALLOWED_BYTES: Final = 48 * 1024


@contextlib.contextmanager
def only_new_objects() -> Iterator[None]:
    """Have `holdings` look at what is made in the context only: a tenth of the time."""
    was_frozen = gc.get_freeze_count() > 0  # counts one by one: not for every check
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@contextlib.contextmanager
def nothing_kept(subject: Subject, what: str) -> Iterator[None]:
    """Whether what is done in the context leaves nothing that lasts, and the process as it was.

    Raises:
        AssertionError: it does.
    """
    before, process = holdings(subject), process_state()
    yield
    changed = differences_in_process(process)
    assert not changed, f"DEV-012: {what} changed {', '.join(changed)}"
    after = holdings(subject)
    for name, (one, _) in before.items():
        on_devices = name.startswith(("bytes on device", "bytes of pinned"))
        allowed = _ALLOWED.get(name, _ALLOWED_BYTES if on_devices else None)
        grown = after[name][0] - one
        assert allowed is None or grown <= allowed, (
            f"DEV-013: {what} left {grown} {name} more than before"
        )


def holdings(subject: Subject) -> dict[str, tuple[int, float]]:
    """What the process has, and by how much of each a call may raise it on average."""
    subject.synchronize_all()
    gc.collect()
    process = psutil.Process()
    found: dict[str, tuple[int, float]] = {
        "objects": (sys.getallocatedblocks(), 0.5),
        "threads": (threading.active_count(), 0.02),
        "bytes of host memory": (process.memory_info().rss, 16_384.0),
        "tensors": (_tensors(), 0.02),
    }
    if hasattr(process, "num_fds"):
        found["file descriptors"] = (process.num_fds(), 0.02)
    if not subject.is_host:
        for index in subject.indices:
            found[f"bytes on device {index}"] = (allocated(subject, index), 64.0)
        found["bytes of pinned memory"] = (_pinned(subject), 64.0)
    return found


def _tensors() -> int:
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


def allocated(subject: Subject, index: int) -> int:
    """Bytes in living tensors, by the device's own word where it has one."""
    readers: list[Callable[[int], Any]] = [subject.backend.memory_allocated]
    own = getattr(subject.module, "memory_allocated", None)
    for read in [own, *readers] if own is not None else readers:
        try:
            return int(read(index))
        except Exception:  # noqa: BLE001 - it does not say: ask the next
            continue
    return 0


def _pinned(subject: Subject) -> int:
    read = getattr(subject.module, "host_memory_stats", None)
    try:
        return int(read()["active_bytes.current"]) if read is not None else 0
    except Exception:  # noqa: BLE001 - it does not say
        return 0
