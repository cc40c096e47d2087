"""Many moves one after the other: faults that come rarely, late, or when memory is used again."""

from __future__ import annotations

from typing import Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.moves import Place, place_name
from anydevice_conformance.moving import read
from anydevice_conformance.situations import Situation, restored, run_in, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["check_crowds", "check_sources_gone"]

#: So many results of so many elements are kept at once, and as often.
_CROWDS: Final = ((24, 1000, 1), (24, 4096, 1), (9, 21_001, 1), (1100, 3, 2))
#: Elements of what is moved and at once let go of.
_SHORT_LIVED: Final = (5, 4096, 300_001)


def check_crowds(subject: Subject, source: Place, target: Place) -> None:
    """Many results of one size that are all kept: each keeps its values while others come.

    Raises:
        AssertionError: one has another's values; the message says which.
    """
    for crowd, count, times in _CROWDS:
        for turn in range(times):
            _check_crowd(subject, source, target, count, crowd, turn * crowd)


def _check_crowd(
    subject: Subject, source: Place, target: Place, count: int, crowd: int, first: int
) -> None:
    there = torch.device("cpu") if target is None else subject.device(target)
    plain = torch.arange(first, first + crowd)[:, None] * 8.0 + torch.arange(float(count)) % 7
    start = plain if source is None else plain.to(subject.device(source))
    rows = [row.clone() for row in start.unbind()] if first else start.unbind()
    found = [
        subject.backend.move(row, there, non_blocking=not first or bool(number % 2))
        for number, row in enumerate(rows)
    ]
    subject.synchronize_all()
    together = read(torch.stack(found))
    for number in (together != plain).any(dim=1).nonzero().flatten()[:1].tolist():
        raise AssertionError(
            f"MOV-001: of {first + crowd} tensors of {count} float32, moved from "
            f"{place_name(source)} to {place_name(target)} and kept, the {first + number + 1}th "
            "has changed"
        )


def check_sources_gone(subject: Subject, source: Place, target: Place) -> None:
    """Sources that are gone once the move has returned, and whose memory is used again.

    Raises:
        AssertionError: what came is not what was moved; the message says of which.
    """
    if subject.is_host:
        return
    every = covering_situations(subject)
    for number, situation in enumerate(every[:: 6 if subject.quick else 1]):

        def work(number: int = number, situation: Situation = situation) -> None:
            for count in _SHORT_LIVED:
                _check_gone(subject, source, target, count, number, situation)

        with restored(subject):
            run_in(subject, situation, work)


def _check_gone(
    subject: Subject, source: Place, target: Place, count: int, number: int, situation: Situation
) -> None:
    here, there = (
        torch.device("cpu") if place is None else subject.device(place)
        for place in (source, target)
    )
    plain = torch.arange(float(count)).add(number)
    start = plain.to(here)
    ways = [(1, True), (2, False), (3, True)] if number % 2 else [(1, True)]
    moved = []
    for factor, late in ways:
        passing = start + factor
        with surroundings(subject):
            moved.append(subject.backend.move(passing, there, non_blocking=late))
        if source is None:
            passing.zero_()
        del passing
    others = [torch.zeros(count, device=here) for _ in range(3)]
    if target is None:
        subject.backend.synchronize(source or 0)
    for factor, found in enumerate(moved, start=1):
        assert torch.equal(read(found), plain + factor), (
            f"MOV-014: {count} float32 were moved from {place_name(source)} to "
            f"{place_name(target)}, changed and gone at once: other values came; {situation!r}"
        )
    del others
