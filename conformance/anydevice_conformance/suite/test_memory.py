"""MEM: free, total, allocated."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
from collections.abc import Callable

import psutil
import torch

from anydevice.backend import MemoryInfo
from anydevice_conformance.fullness import QUICKLY, check_full
from anydevice_conformance.marks import two_devices
from anydevice_conformance.measuring import (
    Change,
    filled,
    looks_like_host_memory,
    observe,
    sizes,
)
from anydevice_conformance.outcomes import left_out, not_claimed
from anydevice_conformance.subject import Subject

_MIB = 1 << 20


def test_MEM_001_memory_info(subject: Subject) -> None:
    """`memory_info` returns a `MemoryInfo` of ints with ``0 <= free <= total`` and ``total > 0``.

    Found: another type, floats, free above total, or numbers that contradict what is allocated.
    Fix: ``return MemoryInfo(free=int(free), total=int(total))``; the driver's order may be the
    other.
    """
    for index in subject.indices:
        _assert_sane(subject.memory(index), index)
        tensor = filled(subject, index, next(sizes(subject, index), 4096))
        _assert_sane(subject.memory(index), index)
        del tensor
        gc.collect()
        _assert_sane(subject.memory(index), index)
        subject.backend.empty_cache(index)
        _assert_sane(subject.memory(index), index)


def test_MEM_002_free_falls(subject: Subject, index: int) -> None:
    """`free` falls by a tensor's size when it comes.

    Found: `free` stands still, moves by another amount, or the wrong way.
    Fix: free is the driver's free memory (not total, not allocated) in bytes, plus what is cached.
    """

    def judge(change: Change) -> str | None:
        if abs(-change.came - change.size) > change.slack:
            return f"a tensor of {change.size} bytes came, and free fell by {-change.came}"
        return None

    observe(subject, index, lambda: subject.memory(index).free, judge)


def test_MEM_003_free_rises_again(subject: Subject, index: int) -> None:
    """`free` rises again when the tensor goes: cached memory counts as free.

    Found: after the tensor was deleted, less (or more) is free than before.
    Fix: add what the process has reserved and does not use to the driver's free memory: claim
    ``caching_allocator``, and the default does it.
    """

    def judge(change: Change) -> str | None:
        if abs(change.left_over) > change.slack:
            return f"a tensor of {change.size} bytes went, and free changed by {change.left_over}"
        if -change.came < change.size - change.slack:
            return f"free never fell for {change.size} bytes, so nothing shows that it rises"
        return None

    observe(subject, index, lambda: subject.memory(index).free, judge)


def test_MEM_004_free_after_empty_cache(subject: Subject, index: int) -> None:
    """`empty_cache` leaves `free` as it was, and the next tensor moves it as the first did.

    Found: cached bytes were counted twice or forgotten after `empty_cache`.
    Fix: compute the cached bytes again at each call (reserved minus allocated); do not remember
    them.
    """

    def empty() -> None:
        gc.collect()
        subject.backend.empty_cache(index)

    def judge(change: Change) -> str | None:
        if abs(change.left_over) > change.slack:
            return f"after empty_cache free is {change.left_over} bytes from what it was"
        if abs(-change.came - change.size) > change.slack:
            return f"after empty_cache a tensor of {change.size} bytes moved free by {change.came}"
        return None

    empty()
    # With nothing held, free cannot exceed the total, and a double count would not show.
    held = filled(subject, index, min(subject.memory(index).free // 3, 1 << 30))
    for _ in range(2):
        observe(subject, index, lambda: subject.memory(index).free, judge, empty)
    del held


def test_MEM_006_allocated_follows(subject: Subject, index: int) -> None:
    """`memory_allocated` rises by a tensor's size, and falls to what it was.

    Found: it counts the cache, stands still, or is in other units.
    Fix: report the bytes of live tensors of this process, not what is reserved.
    """
    assert type(subject.allocated(index)) is int, "memory_allocated returns no int"

    def judge(change: Change) -> str | None:
        most = change.size + max(2 * _MIB, change.size // 8)
        if not change.size <= change.came <= most:
            return f"a tensor of {change.size} bytes came, and allocated rose by {change.came}"
        if abs(change.left_over) > change.slack:
            return f"the tensor went, and allocated stayed {change.left_over} bytes higher"
        return None

    observe(subject, index, lambda: subject.allocated(index), judge)


@two_devices
def test_MEM_007_index_obeyed(subject: Subject) -> None:
    """A tensor on one device moves that device's numbers and no other's.

    Found: two devices give the same numbers, or each other's.
    Fix: pass the index on to the driver; a query without one asks the current device.
    """
    one, other = subject.pair()
    for here, there in ((one, other), (other, one)):
        _assert_apart(subject, here, there, lambda i: subject.memory(i).free, "free")
    subject.allocated(one)
    for here, there in ((one, other), (other, one)):
        _assert_apart(subject, here, there, subject.allocated, "allocated")


def _assert_apart(
    subject: Subject, here: int, there: int, read: Callable[[int], int], what: str
) -> None:
    def judge(change: Change) -> str | None:
        if abs(change.came) > change.slack or abs(change.left_over) > change.slack:
            return f"a tensor here moved {what} of device {there} by {change.came}"
        return None

    observe(subject, here, lambda: read(there), judge)


def test_MEM_009_free_can_be_had(subject: Subject, index: int) -> None:
    """Three quarters of `free` (at most 1 GiB) can be allocated.

    Found: an allocation within `free` failed, or the tensors could not be written.
    Fix: report what the driver can still give, not the total.
    """
    held = [filled(subject, index, min(subject.memory(index).total // 3, 128 * _MIB))]
    free = subject.memory(index).free
    target = min(int(free * 0.75), (256 if subject.quick else 1024) * _MIB)
    chunk = max(1, target // 8)
    try:
        for _ in range(8):
            held.append(filled(subject, index, chunk))
    except Exception as error:
        got = (len(held) - 1) * chunk
        raise AssertionError(
            f"device {index} said {free} bytes are free, and gave {got}: {error!s:.300}"
        ) from error
    assert all(tensor[-1].item() == 1 for tensor in held)


def test_MEM_010_total_is_constant(subject: Subject, index: int) -> None:
    """`total` is the same with and without tensors, and each device's own.

    Found: `total` moves with the load.
    Fix: report the device's capacity, not free plus allocated.
    """
    before = subject.memory(index).total
    tensor = filled(subject, index, next(sizes(subject, index), 4096))
    assert subject.memory(index).total == before, "total changed when a tensor came"
    del tensor
    assert subject.memory(index).total == before, "total changed when a tensor went"


def test_MEM_011_peak(subject: Subject, index: int) -> None:
    """The peak is the most bytes that lived at once since the reset.

    Found: the peak forgets, never resets, or is below what was there.
    Fix: use the driver's ``max_memory_allocated`` and ``reset_peak_memory_stats`` with the index.
    """
    backend, size = subject.backend, 1 * _MIB
    try:
        backend.reset_peak_memory(index)
        base = backend.peak_memory_allocated(index)
    except NotImplementedError as error:
        not_claimed(f"the device keeps no peak: {error}")
    tensors = [filled(subject, index, size) for _ in range(4)]
    peak = backend.peak_memory_allocated(index)
    assert peak >= base + 4 * size, f"{4 * size} bytes came, and the peak rose by {peak - base}"
    backend.reset_peak_memory(index)
    kept = backend.peak_memory_allocated(index)
    assert kept >= base + 4 * size, f"after a reset the peak is {kept}, below what lives"
    peak = min(peak, kept)
    del tensors
    gc.collect()
    backend.synchronize(index)
    assert backend.peak_memory_allocated(index) >= peak, "the peak fell when tensors went"
    backend.reset_peak_memory(index)
    again = backend.peak_memory_allocated(index)
    assert again <= base + size, f"after the reset the peak is {again}, not about {base}"


def test_MEM_014_moves_leave_nothing(subject: Subject, index: int) -> None:
    """After many moves whose results are gone, `memory_allocated` is what it was.

    Found: moves keep something alive on the device.
    Fix: keep no reference to tensors that were moved (caches, lists of copies in flight).
    """
    if subject.is_host:
        left_out("the device is the host: nothing is moved")
    source = torch.ones(64 * 1024)
    _round_trips(subject, index, source, 3)
    before = subject.allocated(index)
    _round_trips(subject, index, source, 20)
    after = subject.allocated(index)
    assert after - before < source.nbytes, f"20 moves left {after - before} bytes on the device"


def _round_trips(subject: Subject, index: int, source: torch.Tensor, times: int) -> None:
    for number in range(times):
        there = subject.put(source, index, non_blocking=bool(number % 2))
        subject.fetch(there, non_blocking=bool(number % 3))
    del there
    subject.backend.synchronize(index)
    gc.collect()


def _assert_sane(info: object, index: int) -> None:
    assert isinstance(info, MemoryInfo), f"memory_info({index}) returned {type(info).__name__}"
    assert type(info.free) is int, f"free is {info.free!r}, not an int"
    assert type(info.total) is int, f"total is {info.total!r}, not an int"
    shared: object = info.shared_with_host
    assert shared is None or type(shared) is bool, f"shared_with_host is {shared!r}"
    assert info.total > 0, f"total is {info.total}"
    assert 0 <= info.free <= info.total, f"free is {info.free}, total is {info.total}"
    if shared is True:
        host = psutil.virtual_memory().total
        assert info.total > host // 8, (
            f"shared_with_host is True, and the total is {info.total} of the host's {host}"
        )


def test_MEM_015_free_is_what_can_be_had(subject: Subject, index: int) -> None:
    """Filled to the last, the device gives about what `free` said all the way, and works on.

    Found: much more, or much less, could be had than `free` said at first or with tensors there;
    or a full device changes what members answer, what is on it, or what its neighbours do.
    Fix: report the driver's free memory; take off what the driver keeps for itself.
    """
    if looks_like_host_memory(subject, index):
        left_out("the device's memory looks like the host's: filling it could harm the machine")
    if subject.quick and subject.memory(index).total > QUICKLY:
        left_out("filling a large device takes long: without --quick")
    check_full(subject, index)
