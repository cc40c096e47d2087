"""Questions about memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice_conformance.probe import Probe
from anydevice_conformance.subject import Subject
from anydevice_conformance.watching import Watched

__all__ = ["Memory", "memory_of", "memory_probes"]

_MIB: Final = 1 << 20


class Memory:
    """Questions about memory, with sizes that the device was seen to tell apart."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.backend: Any = Watched(subject)
        self.totals = {i: self.read("memory_info", i, "total") for i in subject.indices}
        self.size = 0
        for size in (_MIB, 24 * _MIB):
            free = min((self.read("memory_info", i, "free") or 0) for i in subject.indices)
            if self.size or free < size * 2 or self.hosted():
                continue
            if self.moves("memory_info", "free", -size) or self.moves("memory_allocated", "", size):
                self.size = size
        self.gives_back = bool(self.size) and self.returned(subject.indices[0])

    def hosted(self) -> bool:
        """Whether the memory is the host's, where others come and go."""
        return self.subject.is_host or self.backend.capabilities.unified_memory

    def read(self, member: str, index: int, field: str = "") -> int | None:
        """A number, or None where the device does not say."""
        try:
            found = getattr(self.backend, member)(index)
        except NotImplementedError:
            return None
        return getattr(found, field, None) if field else found

    def moves(self, member: str, field: str, size: int) -> bool:
        """Whether a number follows a tensor of so many bytes: asked on the first device only.

        A backend that is wrong on another one, or wrong in the other number, must not be let off.
        """
        index = self.subject.indices[0]
        before = self.read(member, index, field)
        tensor = self.tensor(index, abs(size))
        during = self.read(member, index, field)
        del tensor
        if not isinstance(before, int) or not isinstance(during, int):
            return False
        return abs(during - before - size) <= abs(size) // 4

    def tensor(self, index: int, size: int) -> torch.Tensor:
        """So many bytes on a device."""
        return torch.ones(size, dtype=torch.uint8, device=self.subject.device(index))

    def reserved(self, index: int) -> int | None:
        """What the device's own module says that its allocator holds."""
        read = getattr(self.subject.module, "memory_reserved", None)
        try:
            return None if read is None else int(read(index))
        except Exception:  # noqa: BLE001 - it does not say
            return None

    def returned(self, index: int) -> bool:
        """Whether `empty_cache` was seen to give such a tensor's memory back."""
        if not self.backend.capabilities.caching_allocator or self.reserved(index) is None:
            return False
        tensor = self.tensor(index, self.size)
        with_it = self.reserved(index) or 0
        del tensor
        self.backend.synchronize(index)
        self.backend.empty_cache(index)
        return (self.reserved(index) or 0) <= with_it - self.size


def memory_of(subject: Subject) -> Memory:
    """The one of a subject, made once."""
    found: Memory | None = subject.__dict__.get("_memory")
    if found is None:
        found = subject.__dict__["_memory"] = Memory(subject)
    return found


def memory_probes(subject: Subject) -> Iterator[Probe]:
    """Questions about sizes of memory, before and after allocations."""
    memory, backend = memory_of(subject), Watched(subject)

    def info(index: int) -> None:
        before = backend.memory_info(index)
        assert type(before).__name__ == "MemoryInfo", f"memory_info returned {before!r}"
        assert before.total == memory.totals[index], (
            f"total of device {index} was {memory.totals[index]}, and is {before.total}"
        )
        shared: Any = before.shared_with_host
        assert shared is None or type(shared) is bool, f"shared_with_host is {shared!r}"
        if memory.size:
            _assert_follows(memory, index, "memory_info", "free", -memory.size)
            memory.tensor(index, memory.size)  # where there is a cache, it goes there
        held = {i: memory.reserved(i) for i in subject.indices}
        backend.memory_info(index)
        now = {i: memory.reserved(i) for i in subject.indices}
        assert now == held, f"memory_info({index}) changed what is reserved from {held} to {now}"

    def allocated(index: int) -> None:
        found: Any = backend.memory_allocated(index)
        assert type(found) is int, f"memory_allocated({index}) returned {found!r}"
        if memory.size:
            _assert_follows(memory, index, "memory_allocated", "", memory.size)

    def peaks(index: int) -> None:
        others = {i: backend.peak_memory_allocated(i) for i in subject.indices if i != index}
        for other in others:  # so that the peak there is not what is there
            if memory.size:
                memory.tensor(other, memory.size)
                others[other] = backend.peak_memory_allocated(other)
        backend.reset_peak_memory(index)
        base = backend.peak_memory_allocated(index)
        assert type(base) is int, f"peak_memory_allocated({index}) returned {base!r}"
        if not memory.size:
            return
        tensor = memory.tensor(index, memory.size)
        living = memory.read("memory_allocated", index)
        backend.reset_peak_memory(index)
        now = memory.read("memory_allocated", index)
        assert now == living, f"the reset of the peak moved memory_allocated from {living} to {now}"
        peak = backend.peak_memory_allocated(index)
        assert living is None or peak >= living, (
            f"after a reset the peak is {peak}, while {living} bytes live"
        )
        del tensor
        tensor = memory.tensor(index, memory.size)
        peak = backend.peak_memory_allocated(index)
        assert peak >= base + memory.size, f"{memory.size} bytes came, the peak rose {peak - base}"
        del tensor
        assert backend.peak_memory_allocated(index) >= peak, "the peak fell when a tensor went"
        backend.reset_peak_memory(index)
        after = backend.peak_memory_allocated(index)
        assert after < peak, f"after the reset of device {index} its peak is still {after}"
        memory.tensor(index, memory.size)  # comes and goes, and nobody asks meanwhile
        found = backend.peak_memory_allocated(index)
        assert found >= after + memory.size, (
            f"{memory.size} bytes came and went, and the peak rose by {found - after}"
        )
        backend.empty_cache(index)
        still = backend.peak_memory_allocated(index)
        assert still == found, f"empty_cache moved the peak from {found} to {still}"
        for other, one in others.items():
            found = backend.peak_memory_allocated(other)
            assert found == one, f"the peak of device {other} was {one}, and is {found}"

    def cache(index: int) -> None:
        backend.empty_cache(index)
        if not memory.gives_back:
            return
        tensor = memory.tensor(index, memory.size)
        with_it = memory.reserved(index) or 0
        del tensor
        _settle(subject, index)
        backend.empty_cache(index)
        found = memory.reserved(index) or 0
        assert found <= with_it - memory.size, (
            f"empty_cache({index}) kept {found} bytes reserved, of {with_it}"
        )

    yield Probe("memory_info", info, subject.backend.memory_info, may_decline=True)
    yield Probe("memory_allocated", allocated, subject.backend.memory_allocated, may_decline=True)

    def repeat(index: int) -> None:
        subject.backend.reset_peak_memory(index)
        subject.backend.peak_memory_allocated(index)

    yield Probe("peak_memory_allocated and reset_peak_memory", peaks, repeat, may_decline=True)
    yield Probe("empty_cache", cache, subject.backend.empty_cache)


def _settle(subject: Subject, index: int) -> None:
    """Wait by torch itself, so that a broken `synchronize` is not what shows."""
    torch.zeros(1, device=subject.device(index)).cpu()


def _assert_follows(memory: Memory, index: int, member: str, field: str, size: int) -> None:
    indices = memory.subject.indices
    before = {i: memory.read(member, i, field) for i in indices}
    tensor = memory.tensor(index, abs(size))
    during = {i: memory.read(member, i, field) for i in indices}
    del tensor
    after = {i: memory.read(member, i, field) for i in indices}
    name = f"{member}.{field}" if field else member
    slack = abs(size) // 4
    for i in indices:
        one, two, three = before[i], during[i], after[i]
        assert type(one) is int and type(two) is int and type(three) is int, (  # noqa: PT018
            f"{name} of device {i} is {one!r}"
        )
        wanted = size if i == index else 0
        assert abs(two - one - wanted) <= slack, (
            f"{abs(size)} bytes came on device {index}, and {name} of device {i} "
            f"moved by {two - one}"
        )
        assert abs(three - one) <= slack, (
            f"{abs(size)} bytes went on device {index}, and {name} of device {i} is "
            f"{three - one} from what it was"
        )
