"""Seeing memory come and go on a machine where others use it too.

A device may count in large steps, and on a shared machine numbers move by themselves. So an
observation is tried with growing sizes, and where the memory is the host's a few times each: a
right backend passes one of them soon, a wrong one fails them all.
"""

from __future__ import annotations

import dataclasses
import gc
import re
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import torch

from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject

__all__ = [
    "Change",
    "filled",
    "kernel_cache",
    "looks_like_host_memory",
    "observe",
    "resembles_host",
    "reserved",
    "sizes",
]

_SMALLEST: Final = 64 * 1024
_TRIES: Final = 4
#: Seconds that one observation waits in all for a system's account, which may be late.
_HOST_LAG: Final = 2.0


@dataclasses.dataclass(frozen=True)
class Change:
    """A number before, during and after the life of a tensor of ``size`` bytes."""

    size: int
    before: int
    during: int
    after: int

    @property
    def slack(self) -> int:
        """What it may be off by."""
        return self.size // 4

    @property
    def came(self) -> int:
        """By how much it rose when the tensor came."""
        return self.during - self.before

    @property
    def left_over(self) -> int:
        """By how much it is higher after than before."""
        return self.after - self.before


def sizes(subject: Subject, index: int) -> Iterator[int]:
    """Sizes of tensors to try, each about four times the one before, and multiples of no step."""
    free, total = subject.memory(index).free, subject.memory(index).total
    limit = min(free // 2, psutil.virtual_memory().available // 4, 1 << 31)
    # What is said to be free may be the fault: try something all the same.
    limit = max(limit, min(total // 8, 32 << 20), _SMALLEST)
    size = max(_SMALLEST, min(free // 16, 64 << 20))
    while size < limit:
        yield size - size // 23
        size *= 4
    yield limit - limit // 23


def observe(
    subject: Subject,
    index: int,
    read: Callable[[], int],
    judge: Callable[[Change], str | None],
    between: Callable[[], object] = gc.collect,
) -> None:
    """Make and delete a tensor on device ``index`` and judge what a number did.

    Args:
        subject: the backend.
        index: the device.
        read: gives the number.
        judge: None when the change is right, else what is wrong with it.
        between: called after the tensor is gone, before the number is read.

    Raises:
        AssertionError: no try was right; with the last one's fault.
    """
    fault: str | None = "too little free memory to see anything"
    hostly = is_host_memory(subject, index)
    deadline = time.monotonic() + (_HOST_LAG if hostly else 0.0)
    accounts: list[Callable[[], int]] = (
        [read, lambda: read() + kernel_cache()] if hostly else [read]
    )
    for size in sizes(subject, index):
        # Once on a device of its own: some faults show only the first time.
        for _ in range(_TRIES if hostly else 1):
            before = [account() for account in accounts]
            tensor = filled(subject, index, size)
            during = _settled(accounts, deadline, partial(_came, before, size))
            del tensor
            subject.backend.synchronize(index)
            between()
            after = _settled(accounts, deadline, partial(_went, before, size))
            changes = list(map(Change, [size] * len(before), before, during, after))
            for change in changes:
                fault = judge(change)
                # The kernel's lists explain a part of what the number did, but not all of it.
                if fault is None and (change is changes[0] or abs(changes[0].came) >= size // 4):
                    return
            fault = f"{judge(changes[0])} ({changes[0]})"
    raise AssertionError(f"device {index}: {fault}")


def _came(before: list[int], size: int, now: list[int]) -> bool:
    """Whether some account moved by about ``size``."""
    return any(abs(one - other) > size * 0.8 for one, other in zip(now, before, strict=True))


def _went(before: list[int], size: int, now: list[int]) -> bool:
    """Whether all accounts are about where they were."""
    return all(abs(one - other) < size * 0.2 for one, other in zip(now, before, strict=True))


def _settled(
    accounts: list[Callable[[], int]], deadline: float, enough: Callable[[list[int]], bool]
) -> list[int]:
    """Read accounts that may lag behind, until they are ``enough`` or time is up."""
    while True:
        values = [account() for account in accounts]
        if enough(values) or time.monotonic() >= deadline:
            return values
        time.sleep(0.02)


def kernel_cache() -> int:
    """Bytes that Linux keeps free for each processor, which it counts neither as free nor as used.

    Since 6.7 these lists may hold an eighth of the memory; a tensor made from them moves no
    account.
    """
    try:
        text = Path("/proc/zoneinfo").read_text()
    except OSError:
        return 0
    pages = sum(int(count) for count in re.findall(r"^\s+count:\s+(\d+)", text, re.MULTILINE))
    return pages * resource.getpagesize()


def filled(subject: Subject, index: int, size: int) -> torch.Tensor:
    """A tensor of ``size`` bytes that is really there: written to, and waited for."""
    tensor = torch.ones(size, dtype=torch.uint8, device=subject.device(index))
    subject.backend.synchronize(index)
    return tensor


def reserved(subject: Subject, index: int) -> int:  # noqa: RET503 - `left_out` never returns
    """Bytes that the process's allocator holds; ends the check where the device does not say."""
    owners: tuple[Any, ...] = (subject.backend.module, torch.accelerator)
    for owner in owners:
        function = getattr(owner, "memory_reserved", None)
        if function is not None:
            try:
                return int(function(index))
            except Exception:  # noqa: BLE001 - it does not say: ask the next
                continue
    left_out("the device does not say what its allocator has reserved")


def looks_like_host_memory(subject: Subject, index: int) -> bool:
    """Whether filling the device could take the memory of this machine."""
    if subject.is_host or subject.capabilities.unified_memory:
        return True
    return resembles_host(subject, index)


def is_host_memory(subject: Subject, index: int) -> bool:
    """Whether the device's memory is the host's, by what it says."""
    if subject.is_host or subject.backend.capabilities.unified_memory:
        return True
    told, host = subject.told(index), psutil.virtual_memory().total
    total = told.total if told is not None else 0
    return bool(0.9 * host < total < 1.02 * host)


def resembles_host(subject: Subject, index: int) -> bool:
    """Whether the device's total is about the host's."""
    total, host = subject.memory(index).total, psutil.virtual_memory().total
    return bool(0.25 * host < total < 1.05 * host)
