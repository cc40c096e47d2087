"""Moves of as many elements as each power of two, one less and one more: where drivers cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import same_bits, short_name
from anydevice_conformance.moves import Place, place_name
from anydevice_conformance.moving import read
from anydevice_conformance.situations import restored, run_in, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["check_sizes", "random_bytes"]

#: The dtypes that take turns: of each number of bytes one.
_DTYPES: Final = (torch.uint8, torch.float32, torch.bfloat16, torch.int64)
#: The largest power of two, in bytes, with ``--quick`` and without; and the largest with all of
#: its neighbours.
_LAST: Final = 22
_LAST_OF_A_FULL_RUN: Final = 26
_LAST_OF_ALL: Final = 18
#: The most bytes of one move, with ``--quick`` and without.
_QUICKLY: Final = 17 << 20
_LARGEST: Final = 200 << 20


def _sizes(itemsize: int, turn: int, last: int) -> Iterator[int]:
    """Numbers of elements around each power of two of bytes; of the large ones one of three."""
    for power in range(itemsize.bit_length() - 1, last + 1):
        for step in (-1, 0, 1):
            if power <= _LAST_OF_ALL or (power + turn) % 3 == step + 1:
                yield max(0, (1 << power) // itemsize + step)


def random_bytes(subject: Subject, size: int) -> torch.Tensor:
    """So many, from the ones that are made once a subject."""
    found: torch.Tensor | None = subject.__dict__.get("_random_bytes")
    if found is None or found.numel() < size:
        generator = torch.Generator().manual_seed(subject.seed + 11)
        enough = max(size, 8 * ((1 << 20) + 9))
        found = torch.randint(0, 256, (enough,), generator=generator, dtype=torch.uint8)
        subject.__dict__["_random_bytes"] = found
    return found[:size]


def check_sizes(subject: Subject, source: Place, target: Place, turn: int) -> None:
    """Move all sizes from one place to another, all kept until the last one has come.

    Raises:
        AssertionError: one is wrong; the message says which.
    """
    places = [place for place in (source, target) if place is not None]
    last = _LAST if subject.quick else _LAST_OF_A_FULL_RUN
    last = min(last, (min(map(subject.room, places)) // 8).bit_length() - 1)
    if subject.is_host or last < _LAST_OF_ALL:
        return
    dtypes = subject.supported(*_DTYPES)
    every = covering_situations(subject)
    for number in range(1 if subject.quick else len(dtypes)):
        dtype = dtypes[(turn + number) % len(dtypes)]
        situation = every[(turn * 5 + number) % len(every)]
        words = f"{short_name(dtype)} from {place_name(source)} to {place_name(target)}"

        def work(dtype: torch.dtype = dtype, words: str = f"{words}; {situation!r}") -> None:
            _check(subject, (source, target), turn, dtype, last, words)

        with restored(subject):
            run_in(subject, situation, work)
    _check_largest(subject, source, target, turn)


def _check_largest(subject: Subject, source: Place, target: Place, turn: int) -> None:
    """One move of about a third of what there is room for, and of no round size."""
    room = min(subject.room(place) for place in (source, target) if place is not None) // 3
    size = min(room, _QUICKLY if subject.quick else _LARGEST) - 4 * (turn % 64) - 1029
    here, there = (
        torch.device("cpu") if place is None else subject.device(place)
        for place in (source, target)
    )
    values = torch.arange(size // 4, dtype=torch.int32).view(torch.uint8)[: size - size % 4 - 3]
    start = values.to(here)
    found = subject.backend.move(start, there, non_blocking=turn % 2 == 0)
    subject.synchronize_all()
    assert same_bits(read(found), values), (
        f"MOV-020: of {values.numel()} bytes from {place_name(source)} to {place_name(target)}, "
        "the values changed"
    )


def _check(
    subject: Subject,
    way: tuple[Place, Place],
    turn: int,
    dtype: torch.dtype,
    last: int,
    words: str,
) -> None:
    here, there = (torch.device("cpu") if place is None else subject.device(place) for place in way)
    count = (1 << last) // dtype.itemsize + 2
    bits = random_bytes(subject, count * dtype.itemsize)
    values = bits.view(dtype)
    storage = values.to(here)
    pins = way[0] is None and subject.capabilities.pinned_memory
    moved = []
    for number, size in enumerate(_sizes(dtype.itemsize, turn, last)):
        first = number % (count - size + 1) % 3
        part = storage[first : first + size]
        with surroundings(subject):
            if pins and number % 3 == turn % 3:
                part = subject.backend.pin_memory(part)
            late = number % 2 == turn % 2
            moved.append((first, size, subject.backend.move(part, there, non_blocking=late), part))
    subject.synchronize_all()
    for first, size, found, part in moved:
        expected = values[first : first + size]
        assert same_bits(read(found), expected), f"MOV-001: of {size} {words}: the values changed"
        assert not part.is_pinned() or same_bits(part, expected), (
            f"PIN-005: pinning changed {size} {words}"
        )
