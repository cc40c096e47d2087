"""A device that is filled in steps: what `free` promises is there, and nothing else changes."""

from __future__ import annotations

import gc
from typing import Final

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.members import still_probes
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.situations import restored
from anydevice_conformance.subject import Subject

__all__ = ["check_full"]

#: Pieces of what is free at first; they are halved down to the smallest when none is left.
_PIECES: Final = 64
_SMALLEST: Final = 65_536
#: After so many pieces it is asked what is free now.
_ASK: Final = (0, 20, 42, 55)


def check_full(subject: Subject, index: int) -> None:
    """Fill a device to the last, and hold what `free` said on the way against what it gave.

    Raises:
        AssertionError: much more, or much less, could be had; or a full device makes members
            answer otherwise, spoils what is there, or disturbs its neighbours.
    """
    still_probes(subject)  # the right answers are noted while there is room
    subject.backend.empty_cache(index)
    said = subject.memory(index)
    piece = max(4096, said.free // _PIECES)
    held: list[torch.Tensor] = []
    levels: list[tuple[int, int]] = []  # given so far, and free then
    error = _fill(subject, index, piece, said.total, held, levels)
    given = sum(tensor.numel() for tensor in held)
    if error is not None:
        _assert_all_else(subject, index, held, error)
    error = None
    held.clear()
    gc.collect()
    subject.backend.empty_cache(index)
    if given > said.total:
        not_claimed("the device takes its memory from the host, and has no limit of its own")
    for before, free in levels:
        more, words = given - before, f"with {before} bytes in use free was {free}"
        assert more >= free * 0.85 - 2 * piece * bool(before), f"{words}; {more} could be had"
        assert more <= free * 1.1 + 2 * piece * bool(before), f"{words}; {more} could be had"


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
