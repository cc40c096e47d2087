"""Random programs of tensors that come and go, and what each device must say of its memory then.

A ledger stands next to the devices: what lives on each of them, and the most that has lived since
the last reset. After each step all devices are asked, not only the one where something happened.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any, Final

import torch
from hypothesis import strategies as st

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.measuring import looks_like_host_memory
from anydevice_conformance.members_memory import Memory
from anydevice_conformance.situations import Situation, restored, run_in, side_stream
from anydevice_conformance.subject import Subject

__all__ = ["Entry", "entries", "run_ledger"]

_MIB: Final = 1 << 20
_KINDS: Final = (
    *("make", "make", "move", "many small", "of a view", "for a moment", "drop", "drop"),
    *("drop all", "reset the peak", "empty the cache", "fill up", "ask too much", "pin"),
    "used elsewhere",
)
#: So many small tensors are made at once, of so many bytes each.
_MANY: Final = 40
_LITTLE: Final = 3000
#: Drivers take memory from the device in blocks of about so many bytes.
_BLOCK: Final = 32 * _MIB
#: A device with more than so many bytes is not filled, and its free bytes move by themselves.
_LARGE: Final = 1 << 30


@dataclasses.dataclass(frozen=True)
class Entry:
    """One step: what is done, on which device, with how many units of memory, and where."""

    kind: str
    device: int
    units: int
    situation: int

    def __repr__(self) -> str:
        words = f"{self.kind} on device {self.device}, {self.units} units"
        return words + (f", in situation {self.situation}" if self.situation else "")


def entries() -> st.SearchStrategy[list[Entry]]:
    """Programs of up to 12 steps; numbers are taken modulo what there is."""
    step = st.builds(
        Entry,
        st.sampled_from(_KINDS),
        st.integers(0, 7),
        st.integers(1, 5),
        st.sampled_from([0] * 8 + list(range(1, 16))),
    )
    return st.lists(step, min_size=4, max_size=12)


@dataclasses.dataclass
class _Account:
    """What one device said at first, what lives there, and the most since the last reset."""

    allocated: int | None
    free: int | None
    total: int | None
    living: int = 0
    slack: int = 0
    peak: tuple[int, int] = (0, 0)

    def grow(self, size: int, slack: int) -> None:
        """A tensor comes, or with a negative size it goes."""
        self.living += size
        self.slack += slack
        self.peak = (max(self.peak[0], self.living), max(self.peak[1], self.living + self.slack))

    def reset(self) -> None:
        """The peak begins with what lives."""
        self.peak = (self.living, self.living + self.slack)


class _Run:
    def __init__(self, subject: Subject, memory: Memory) -> None:
        self.subject, self.memory = subject, memory
        self.held: list[tuple[int, int, int, Any]] = []  # device, bytes, slack, what holds them
        self.accounts: dict[int, _Account] = {}
        self.peaks, self.filled = True, False
        for index in subject.indices:
            try:
                subject.backend.reset_peak_memory(index)
            except NotImplementedError:
                self.peaks = False
            allocated = memory.read("memory_allocated", index)
            free = memory.read("memory_info", index, "free")
            self.accounts[index] = _Account(allocated, free, memory.totals[index])

    # ------------------------------------------------------------------ the steps

    def step(self, entry: Entry) -> None:
        index = self.subject.indices[entry.device % len(self.subject.indices)]
        if entry.kind == "drop" and self.held:
            self.drop(entry.units % len(self.held))
        elif entry.kind == "drop all":
            while self.held:
                self.drop(0)
        elif entry.kind == "reset the peak" and self.peaks:
            self.subject.backend.reset_peak_memory(index)
            self.accounts[index].reset()
        elif entry.kind == "empty the cache":
            self.subject.backend.empty_cache(index)
        elif entry.kind == "fill up":
            self.fill_up(index)
        elif entry.kind == "ask too much":  # it moves no number
            with contextlib.suppress(Exception):
                torch.empty(1 << 50, dtype=torch.uint8, device=self.subject.device(index))
        elif entry.kind == "pin":  # is the host's memory
            if self.subject.capabilities.pinned_memory:
                pinned = self.subject.backend.pin_memory(torch.ones(entry.units * _MIB // 4))
                self.keep(index, 0, pinned, slack=0)
        elif 3 * entry.units * self.memory.size < self.subject.room(index):
            self.make(entry.kind, index, entry.units * self.memory.size)

    def make(self, kind: str, index: int, size: int) -> None:
        if kind == "move":
            self.keep(index, size, self.subject.put(torch.ones(size // 4), index))
        elif kind == "of a view":  # the whole is gone, and its view keeps all of it
            self.keep(index, size, self.memory.tensor(index, size)[3:9])
        elif kind == "many small":
            small = [self.memory.tensor(index, _LITTLE) for _ in range(_MANY)]
            self.keep(index, _LITTLE * _MANY, small, slack=8 * _MIB)
        elif kind == "used elsewhere":  # its memory waits for another stream, and no longer
            tensor = self.memory.tensor(index, size)
            if self.subject.capabilities.streams:
                with contextlib.suppress(RuntimeError):  # not every device has it
                    tensor.record_stream(side_stream(self.subject, index))
            self.keep(index, size, tensor)
        elif kind in ("make", "for a moment"):
            self.keep(index, size, self.memory.tensor(index, size))
            if kind == "for a moment":
                self.drop(len(self.held) - 1)

    def keep(self, index: int, size: int, what: Any, slack: int = 2 * _MIB) -> None:
        slack += size // 2
        self.held.append((index, size, slack, what))
        self.accounts[index].grow(size, slack)

    def drop(self, number: int) -> None:
        index, size, slack, what = self.held.pop(number)
        self.accounts[index].grow(-size, -slack)
        one = what[0] if isinstance(what, list) else what
        self.subject.backend.synchronize(index)  # it was made on whichever stream
        assert one[-1].item() == 1, f"OOM-004: what lived on device {index} has changed"
        del one, what
        self.subject.backend.synchronize(index)
        self.memory.tensor(index, 1)  # some allocators look for what is free when they are asked

    def fill_up(self, index: int) -> None:
        """Most of what is free is taken for a moment, and all devices are asked then."""
        if (self.accounts[index].total or _LARGE) >= _LARGE:
            return
        size = self.subject.room(index) // 20 * 17
        if self.filled or size < self.memory.size or looks_like_host_memory(self.subject, index):
            return
        self.filled = True  # once a program: it takes time
        device = self.subject.device(index)
        large = torch.empty(size, dtype=torch.uint8, device=device)
        large[-1] = 1
        self.keep(index, size, large)
        del large
        self.compare()
        self.drop(len(self.held) - 1)

    # ------------------------------------------------------------------ what must be told

    def compare(self, peaks: bool = True) -> None:
        read, step = self.memory.read, self.memory.size // 4
        for index, account in self.accounts.items():
            words = f"on device {index}, where {account.living} bytes live"
            found = read("memory_allocated", index)
            if account.allocated is not None and found is not None:
                more = found - account.allocated
                assert account.living <= more <= account.living + account.slack + step, (
                    f"MEM-006: memory_allocated rose by {more} {words}"
                )
            if self.peaks and peaks:
                self.compare_peak(index, account, words)
            if account.free is None:
                continue
            held = {i: self.memory.reserved(i) for i in self.accounts}
            free, total = read("memory_info", index, "free"), read("memory_info", index, "total")
            now = {i: self.memory.reserved(i) for i in self.accounts}
            assert now == held, f"MEM-001: memory_info changed what is reserved {words}"
            assert total == account.total, f"MEM-010: total became {total} {words}"
            if (account.total or _LARGE) >= _LARGE:
                continue
            less = account.free - (free or 0)
            assert abs(less - account.living) <= account.living // 4 + step + self.blocks(index), (
                f"MEM-002, MEM-003: free is {less} less than at first {words}"
            )

    def blocks(self, index: int) -> int:
        """How much a device without a cache of its own may take at a time, unseen till then."""
        caches = self.subject.capabilities.caching_allocator
        return 0 if caches else min(_BLOCK, (self.accounts[index].total or 0) // 8)

    def compare_peak(self, index: int, account: _Account, words: str) -> None:
        peak = self.memory.read("peak_memory_allocated", index)
        least, most = (part + (account.allocated or 0) for part in account.peak)
        assert peak is not None, f"MEM-011: no peak {words}"
        assert peak >= least, f"MEM-011: the peak is {peak} of {least} {words}"
        if account.allocated is not None:
            assert peak <= most + self.memory.size // 4, (
                f"MEM-011: the peak is {peak}, and there were {least} {words}"
            )


def run_ledger(subject: Subject, memory: Memory, program: list[Entry]) -> None:
    """Run a program and hold what each device says against the ledger, after each step.

    Raises:
        AssertionError: a device says what the ledger does not.
    """
    gc.collect()
    subject.synchronize_all()
    run, every = _Run(subject, memory), covering_situations(subject)

    def work(entry: Entry) -> None:
        run.step(entry)
        run.compare(peaks=entry.units % 2 == 0)  # what is not asked for must be right, too

    for entry in program:
        situation = every[entry.situation % len(every)] if entry.situation else Situation()
        with restored(subject):
            run_in(subject, situation, lambda entry=entry: work(entry))  # type: ignore[misc]
