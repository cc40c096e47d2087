"""Many moves one after the other: faults that come rarely, late, or when memory is used again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import DTYPES, same_bits, short_name
from anydevice_conformance.holdings import allocated
from anydevice_conformance.moves import Place, place_name
from anydevice_conformance.moving import read
from anydevice_conformance.situations import Situation, restored, run_in, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["check_all"]

#: So many results of so many elements are kept at once, and as often.
_CROWDS: Final = ((24, 4096, 1), (9, 21_001, 1), (1100, 3, 2))
#: The last so many copies may be kept until they are known to be done.
_IN_FLIGHT: Final = 16
_TWINS: Final = ((), (1,), (3, 5))
#: Elements of what is moved and at once let go of.
_SHORT_LIVED: Final = (5, 4096, 300_001)


def check_all(subject: Subject, source: Place, target: Place) -> None:
    """Many at once, equal ones, and sources that are gone, from one place to another.

    Raises:
        AssertionError: one is wrong; the message says which.
    """
    check_crowds(subject, source, target)
    check_twins(subject, source, target)
    check_sources_gone(subject, source, target)
    if source is None and target is not None:
        check_pinned_sources(subject, target)


def check_crowds(subject: Subject, source: Place, target: Place) -> None:
    """Many results of one size that are all kept: each keeps its values while others come.

    Afterwards all are let go of, and their sources too: none of them is kept.

    Raises:
        AssertionError: one has another's values, or some are kept; the message says which.
    """
    for crowd, count, times in _CROWDS:
        for turn in range(times):
            words = f"tensors of {count} float32, moved from {place_name(source)} to "
            words += place_name(target)
            for again in (False, True):  # what the first time takes may serve the others
                before = _on_devices(subject)
                one, alive = _check_crowd(subject, source, target, count, crowd, turn, words)
                if subject.is_host:
                    break
                _assert_gone(alive, f"{crowd} {words}")
                allowed = _IN_FLIGHT * max(one.values())
                grown = {i: now - before[i] for i, now in _on_devices(subject).items()}
                if max(grown.values()) <= allowed:
                    break
                assert not again, (
                    f"MEM-014: {crowd} {words}, are gone, and devices have {grown} bytes more"
                )


def _on_devices(subject: Subject) -> dict[int, int]:
    if subject.is_host:
        return {}
    subject.synchronize_all()
    return {index: allocated(subject, index) for index in subject.indices}


def _assert_gone(alive: list[Callable[[], bool]], words: str) -> None:
    """No more of them are kept than copies may be in flight."""
    for collect in (False, True):
        if collect:  # takes long: only to be sure
            gc.collect()
        kept = sum(one() for one in alive)
        if kept <= _IN_FLIGHT:
            break
    else:
        raise AssertionError(f"MEM-014: of {words}, sources and results, {kept} are kept")


def _check_crowd(
    subject: Subject,
    source: Place,
    target: Place,
    count: int,
    crowd: int,
    turn: int,
    words: str,
) -> tuple[dict[int, float], list[Callable[[], bool]]]:
    """Move one crowd; returns what a tensor takes on each device, and all that was moved."""
    there = torch.device("cpu") if target is None else subject.device(target)
    first = turn * crowd
    plain = torch.arange(first, first + crowd)[:, None] * 8.0 + torch.arange(float(count)) % 7
    before = _on_devices(subject)
    start = plain if source is None else plain.to(subject.device(source))
    rows = [row.clone() for row in start.unbind()]
    found = [
        subject.backend.move(
            row, there, non_blocking=bool(number % 2) or (crowd > 1000 and not first)
        )
        for number, row in enumerate(rows)
    ]
    one = {i: (now - before[i]) / crowd for i, now in _on_devices(subject).items()}
    together = read(torch.stack(found))
    for number in (together != plain).any(dim=1).nonzero().flatten()[:1].tolist():
        raise AssertionError(
            f"MOV-001: of {first + crowd} {words} and kept, the {first + number + 1}th has changed"
        )
    step = 1 + crowd // 200
    return one, [_alive(tensor) for tensor in (*rows[::step], *found[::step])]


def _alive(tensor: torch.Tensor) -> Callable[[], bool]:
    """Whether somebody still has its memory, by whatever tensor."""
    try:
        storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    except (NotImplementedError, RuntimeError):  # it has none that torch knows
        kept = weakref.ref(tensor)
        return lambda: kept() is not None
    return lambda: not storage.expired()  # type: ignore[no-untyped-call]


def check_pinned_sources(subject: Subject, target: int) -> None:
    """Page-locked sources that are let go of: none is kept once the work is known to be done.

    Nothing but a copy to the host waits for the device.

    Raises:
        AssertionError: some are kept.
    """
    if subject.is_host or not subject.capabilities.pinned_memory:
        return
    backend, there, alive = subject.backend, subject.device(target), []
    for turn in (False, True):  # the second crowd comes when the first is long done
        for number in range(40):
            source = backend.pin_memory(torch.full((300,), float(number)))
            moved = backend.move(source, there, non_blocking=True)
            alive.append(_alive(source))
            del source
        assert torch.equal(moved.cpu(), torch.full((300,), 39.0)), "MOV-001: the values changed"
        del moved
        if turn:
            _assert_gone(alive, "pinned tensors that were moved without a wait")


def check_twins(subject: Subject, source: Place, target: Place) -> None:
    """Two tensors of equal values, of every dtype, stay two: what is written to one is its own.

    Raises:
        AssertionError: they have become one; the message says of which.
    """
    if subject.is_host:
        return
    here, there = (
        torch.device("cpu") if place is None else subject.device(place)
        for place in (source, target)
    )
    for number, dtype in enumerate(subject.supported(*DTYPES)):
        for shape in _TWINS:
            plain = torch.ones(shape, dtype=dtype)
            pair = [plain.to(here) if source is not None else plain.clone() for _ in range(2)]
            late = bool(number % 2)
            one, other = (subject.backend.move(t, there, non_blocking=late) for t in pair)
            subject.backend.synchronize(target if target is not None else source or 0)
            one.zero_()
            assert same_bits(read(other), plain), (
                f"MOV-025: two {short_name(dtype)} of shape {shape} and of equal values, moved "
                f"from {place_name(source)} to {place_name(target)}, share their memory"
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
        passing.zero_()  # on a device it is queued after the copy
        del passing
    others = [torch.zeros(count, device=here) for _ in range(3)]
    if source is not None and subject.capabilities.streams:  # what follows the copy is done
        backend = subject.backend
        backend.synchronize_event(backend.record_event(backend.current_stream(source)))
    if target is None:
        subject.backend.synchronize(source or 0)
    for factor, found in enumerate(moved, start=1):
        assert torch.equal(read(found), plain + factor), (
            f"MOV-014: {count} float32 were moved from {place_name(source)} to "
            f"{place_name(target)}, changed and gone at once: other values came; {situation!r}"
        )
    del others
