"""MEM: what claims of caches and of unified memory mean, and what other processes take."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc

import psutil

from anydevice_conformance.children import Holder
from anydevice_conformance.marks import needs, slow
from anydevice_conformance.measuring import (
    Change,
    filled,
    is_host_memory,
    kernel_cache,
    observe,
    resembles_host,
    reserved,
    sizes,
)
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.subject import Subject


@needs("caching_allocator")
def test_MEM_005_empty_cache_gives_back(subject: Subject, index: int) -> None:
    """After `empty_cache` unused memory is no longer reserved.

    Found: `empty_cache(index)` keeps the cache, or empties another device's.
    Fix: call the driver's function with that device as the current one.
    """

    def empty() -> None:
        gc.collect()
        subject.backend.empty_cache(index)

    def judge(change: Change) -> str | None:
        if change.left_over > change.slack:
            return f"{change.left_over} bytes are still reserved after empty_cache"
        if change.came < change.size - change.slack:
            return (
                f"{change.size} bytes came, and {change.came} more are reserved: they were cached"
            )
        return None

    empty()
    observe(subject, index, lambda: reserved(subject, index), judge, empty)


@slow
def test_MEM_008_another_process_is_seen(subject: Subject) -> None:
    """While another process holds memory, `free` is smaller by that much.

    Found: `free` does not know of other processes.
    Fix: ask the driver for the device's free memory; do not compute total minus what this process
    uses.
    """
    for index in sorted(subject.ends, key=lambda i: subject.memory(i).total):
        with Holder(subject.type, index) as other:
            fault = _unseen(subject, index, other)
            if fault is not None and _is_private(subject, index, other):
                not_claimed("each process has this device's memory for itself: none to be seen")
        assert fault is None, f"device {index}: {fault}"


def _unseen(subject: Subject, index: int, other: Holder) -> str | None:
    """What is wrong with `free` while another process holds memory; None when nothing is."""
    fault = "too little free memory to see anything"
    for size in [size for size in sizes(subject, index) for _ in range(4)]:
        other.hold(1)
        before, cache = subject.memory(index).free, kernel_cache()
        other.hold(size)
        fell = before - subject.memory(index).free
        with_cache = fell + cache - kernel_cache() if is_host_memory(subject, index) else fell
        if abs(fell - size) <= size // 4:
            return None
        if fell >= size // 4 and abs(with_cache - size) <= size // 4:
            return None  # Linux served the rest from lists that count neither as free nor as used
        fault = f"another process holds {size} bytes, and free fell by {fell}"
    other.hold(1)
    return fault


def _is_private(subject: Subject, index: int, other: Holder) -> bool:
    """Whether two processes can together hold more than the total: then they do not share it."""
    total = subject.memory(index).total
    size = int(total * 0.7)
    if size * 2.5 > psutil.virtual_memory().available or subject.is_host:
        return False
    try:
        here = filled(subject, index, size)
        other.hold(size)
        return bool(here[-1].item() == 1)
    except (AssertionError, RuntimeError):
        return False


@needs("unified_memory")
def test_MEM_012_unified_memory(subject: Subject, index: int) -> None:
    """A tensor on the device takes its size from the host's available memory.

    Found: unified memory is claimed, and the host loses nothing.
    Fix: do not claim ``unified_memory`` for a device with memory of its own.
    """
    if not subject.backend.capabilities.unified_memory and not resembles_host(subject, index):
        not_claimed("the device's total is not the host's")

    def judge(change: Change) -> str | None:
        if abs(-change.came - change.size) > change.slack:
            return (
                f"{change.size} bytes came, and the host's available memory fell by {-change.came}"
            )
        return None

    observe(subject, index, lambda: psutil.virtual_memory().available, judge)


@needs("caching_allocator")
def test_MEM_013_a_claimed_cache_is_one(subject: Subject, index: int) -> None:
    """A deleted tensor's memory stays reserved until `empty_cache`.

    Found: a caching allocator is claimed, and nothing is cached.
    Fix: do not claim ``caching_allocator`` for a device that gives memory back at once.
    """
    subject.backend.empty_cache(index)

    def judge(change: Change) -> str | None:
        if change.came < change.size - change.slack:
            return f"{change.size} bytes came, and {change.came} more are reserved"
        if change.after < change.during - change.slack:
            return "the memory went back to the device at once: nothing is cached"
        subject.backend.empty_cache(index)
        return None

    observe(subject, index, lambda: reserved(subject, index), judge)
