"""A device that is filled in steps: what `free` promises is there, and nothing else changes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Final

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.lacking import Lacking
from anydevice_conformance.members import still_probes
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.situations import Situation, restored, run_in, side_stream
from anydevice_conformance.subject import Subject

__all__ = ["QUICKLY", "check_full", "check_neighbour"]

#: A device of at most so many bytes is filled with ``--quick``, too.
QUICKLY: Final = 128 << 20

#: The most bytes that are asked for again once it was full.
_MOST: Final = 1 << 30
#: Pieces of what is free at first; they are halved down to the smallest when none is left.
_PIECES: Final = 64
_SMALLEST: Final = 256
#: After so many pieces it is asked what is free now.
_ASK: Final = (0, 20, 42, 55)


def check_full(subject: Subject, index: int) -> None:
    """Fill a device to the last, and hold what `free` said on the way against what it gave.

    Raises:
        AssertionError: much more, or much less, could be had; or a full device makes members
            answer otherwise, spoils what is there, or disturbs its neighbours.
    """
    still_probes(subject)  # the right answers are noted while there is room
    _members(subject, index)  # what they take once, they take now
    lacking = Lacking(subject, index)
    subject.backend.empty_cache(index)
    said = subject.memory(index)
    piece = max(4096, said.free // _PIECES)
    held: list[torch.Tensor] = []
    levels: list[tuple[int, int]] = []  # given so far, and free then
    error = _fill(subject, index, piece, said.total, held, levels)
    given = sum(tensor.numel() for tensor in held)
    if error is not None:
        _assert_all_else(subject, index, held, error)
        lacking.assert_recognised()
    error, full = None, error is not None
    held.clear()
    gc.collect()
    if full:
        _assert_had_again(subject, index)
    if not subject.quick:
        lacking.assert_works(f"OOM-004: device {index} was full and has room again")
    subject.backend.empty_cache(index)
    if given > said.total:
        not_claimed("the device takes its memory from the host, and has no limit of its own")
    for before, free in levels:
        more, words = given - before, f"with {before} bytes in use free was {free}"
        assert more >= free * 0.85 - 2 * piece * bool(before), f"{words}; {more} could be had"
        assert more <= free * 1.1 + 2 * piece * bool(before), f"{words}; {more} could be had"


def check_neighbour(subject: Subject, full: int, free: int) -> None:
    """Fill a device to the last: on another one all works that takes memory there.

    Raises:
        AssertionError: it does not.
    """
    lacking = Lacking(subject, free)  # what they take once, they take now
    subject.backend.empty_cache(full)
    total = subject.memory(full).total
    held: list[torch.Tensor] = []
    error = _fill(subject, full, max(4096, subject.memory(full).free // 8), total, held, [])
    if error is not None:
        lacking.assert_works(f"OOM-008: device {full} is full")
        found = subject.fetch(subject.put(torch.arange(5.0), free) + 1)
        assert found.tolist() == [1, 2, 3, 4, 5], f"device {full} is full: device {free} is wrong"
        assert held[0][-1].item() == 1, f"what is on device {full} changed"
    held.clear()
    gc.collect()
    subject.backend.empty_cache(full)


def _fill(
    subject: Subject,
    index: int,
    piece: int,
    total: int,
    held: list[torch.Tensor],
    levels: list[tuple[int, int]],
) -> Exception | None:
    """Make tensors, of ever smaller pieces at last, until the device gives none."""
    error, size, given = None, piece, 0
    while given <= total + piece:
        if size == piece and len(held) in _ASK:
            levels.append((given, subject.memory(index).free))
        try:
            tensor = torch.ones(size, dtype=torch.uint8, device=subject.device(index))
            subject.backend.synchronize(index)
        except Exception as caught:  # noqa: BLE001 - the device's own: it is full
            error = caught.with_traceback(None)
            if size <= _SMALLEST:
                break
            size = max(_SMALLEST, size // 4)
            continue
        held.append(tensor)
        given += size
    return error


def _assert_all_else(
    subject: Subject, index: int, held: list[torch.Tensor], error: Exception
) -> None:
    """On a full device members answer as ever, what is there can leave, and others work."""
    assert subject.backend.is_out_of_memory(error) is True, (
        f"OOM-002: not recognised: {type(error).__name__}: {error!s:.200}"
    )
    for probe in still_probes(subject):
        with restored(subject):
            try:
                probe.run(index)
            except AssertionError as fault:
                raise AssertionError(f"DEV-012: device {index} is full: {fault}") from fault
    with restored(subject):
        try:
            _members(subject, index)
        except Exception as fault:
            raise AssertionError(
                f"MEM-015: device {index} is full: {type(fault).__name__}: {fault!s:.300}"
            ) from fault
    for tensor in (held[0], held[-1]):
        expected = torch.ones(tensor.numel(), dtype=torch.uint8)
        assert same_bits(subject.fetch(tensor), expected), (
            f"OOM-004: what is on device {index} changed when it was filled"
        )
    for other in subject.indices:
        if other == index or subject.room(other) < held[-1].nbytes * 4:
            continue
        crossed = subject.put(held[-1], other)
        assert crossed.cpu().eq(1).all(), (
            f"OOM-008: device {index} is full: a move from it is wrong"
        )
        values = torch.arange(300.0)
        found = subject.fetch(subject.put(values, other, non_blocking=True) + 1)
        assert torch.equal(found, values + 1), (
            f"OOM-008: device {index} is full, and device {other} is wrong"
        )


def _assert_had_again(subject: Subject, index: int) -> None:
    """What was let go of is there again: by each way to ask for it, on each stream."""
    size = min(subject.room(index) // 4 * 3, _MOST)
    wide = torch.ones(1, dtype=torch.uint8).expand(size)
    device, far = subject.device(index), [i for i in subject.indices if i != index][-1:]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "a non-blocking move": lambda: subject.put(wide, index, non_blocking=True),
        "torch.empty": lambda: torch.empty(size, dtype=torch.uint8, device=device).fill_(1),
        "a move": lambda: subject.put(wide, index),
    }
    if far and subject.strided:
        there = wide[:1].to(subject.device(far[0])).expand(size)
        ways[f"a move from device {far[0]}"] = lambda: subject.put(there, index)
    sides = (True, False) if subject.capabilities.streams else (False,)
    for number, (name, ask) in enumerate(ways.items()):
        for side in sides if number % 2 == 0 or not subject.quick else sides[:1]:
            situation = Situation(index, subject.indices[0], side, thread=bool(number % 2))
            with restored(subject):
                try:
                    last = run_in(subject, situation, lambda: int(ask()[-1]))  # noqa: B023
                except Exception as fault:
                    raise AssertionError(
                        f"MEM-003, MEM-009: device {index} was full and all was let go of: {name} "
                        f"of {size} bytes: {type(fault).__name__}: {fault!s:.200}; {situation!r}"
                    ) from fault
            assert last == 1, f"MOV-001: {name} of {size} bytes: its last byte is {last}"


def _members(subject: Subject, index: int) -> None:
    """Members that take no memory of the device, once they have been called."""
    backend, claims = subject.backend, subject.capabilities
    for member in (backend.memory_info, backend.memory_allocated, backend.peak_memory_allocated):
        with contextlib.suppress(NotImplementedError):
            assert member(index) == member(index), f"{member.__name__} differs from call to call"
    if claims.streams:
        current, side = backend.current_stream(index), side_stream(subject, index)
        for stream, then in ((side, current), (current, side)):
            with backend.use_stream(stream):
                event = backend.record_event(stream)
            backend.wait_event(then, event)
            backend.synchronize_event(event)
    if claims.device_rng:
        backend.set_rng_state(backend.rng_state(index), index)
        backend.manual_seed_all(7)
    if claims.pinned_memory:
        pinned = backend.pin_memory(torch.arange(30.0))
        assert torch.equal(pinned, torch.arange(30.0)), "pin_memory changed the values"
    with contextlib.suppress(NotImplementedError):
        backend.reset_peak_memory(index)
        assert backend.peak_memory_allocated(index) >= subject.allocated(index), (
            "after a reset the peak is below what lives"
        )
    backend.synchronize(index)
