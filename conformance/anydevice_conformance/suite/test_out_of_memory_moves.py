"""OOM: moves to a device without room."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from anydevice_conformance.holdings import allocated
from anydevice_conformance.moves import Place, place_name
from anydevice_conformance.moving import flags_of
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.situations import Situation, restored, run_in, state
from anydevice_conformance.subject import Subject

#: More than any machine has, and what an address can still name.
_ABSURD = 1 << 46
#: Bytes of what a source is a view of.
_KEPT = 1 << 16


def test_OOM_006_move_raises_it(subject: Subject, index: int) -> None:
    """A move to a device without room raises the same, and leaves the source alone.

    Found: `move` swallowed the error, wrapped it beyond recognition, or harmed the source.
    Fix: let the allocator's exception pass through `move`.
    """
    if subject.is_host:
        left_out("the device is the host: nothing is moved")
    told = subject.told(index)
    size = max(told.total * 2, 1 << 30) if told is not None else _ABSURD
    source = torch.ones(1, dtype=torch.uint8).expand(size)
    side = subject.capabilities.streams
    last = Situation(index, subject.indices[-1], side, mode="no_grad")
    for number, situation in enumerate(
        (Situation(index), last, Situation(index, subject.indices[0], side, thread=True))
    ):
        non_blocking = bool(number % 2)

        def refused(non_blocking: bool = non_blocking) -> BaseException:
            before = state(subject)
            with pytest.raises(Exception) as found:  # noqa: PT011 - whichever the device raises
                subject.put(source, index, non_blocking=non_blocking)
            changed = before.differences(state(subject))
            assert not changed, f"DEV-012: a move without room: {changed}"
            return found.value

        with restored(subject):
            raised = run_in(subject, situation, refused)
        assert subject.backend.is_out_of_memory(raised), (
            f"not recognised: {type(raised).__name__}: {raised!s:.200}"
        )
        assert source.device.type == "cpu"
        assert source[0].item() == source[-1].item() == 1, "the source changed"
        leaf = torch.nn.Parameter(torch.ones(1).expand(size // 4))
        flags = flags_of(leaf)
        with pytest.raises(Exception):  # noqa: B017, PT011 - as above
            subject.put(leaf, index, non_blocking=non_blocking)
        assert flags_of(leaf) == flags, f"the source was {flags}, and is {flags_of(leaf)}"
        assert subject.fetch(subject.put(torch.ones(3), index)).tolist() == [1.0] * 3
    others = [other for other in subject.indices if other != index]
    for other in others[-1:] if subject.strided else []:
        _assert_no_room_between(subject, other, index, size)
    for place in (None, *others[-1:]) if subject.strided else ():
        for late in (False, True):
            _assert_source_let_go(subject, place, index, size, late)


def _assert_no_room_between(subject: Subject, source: int, target: int, size: int) -> None:
    """From another device, too: a tensor that has one element there, and is wide."""
    there = subject.put(torch.ones(1, dtype=torch.uint8), source).expand(size)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whichever the device raises
        subject.put(there, target)
    assert subject.backend.is_out_of_memory(caught.value), (
        f"between devices, not recognised: {type(caught.value).__name__}: {caught.value!s:.200}"
    )
    assert subject.is_on(there, source), f"the source is on {there.device}"
    assert subject.fetch(there[:1] + there[-1:]).item() == 2, "the source changed"


def _assert_source_let_go(
    subject: Subject, source: Place, target: int, size: int, late: bool
) -> None:
    """What could not be moved is gone once its user lets go of it."""
    here = torch.device("cpu") if source is None else subject.device(source)
    before = {i: allocated(subject, i) for i in subject.indices}
    start = torch.ones(_KEPT, dtype=torch.uint8).to(here)
    alive = StorageWeakRef(start.untyped_storage())  # type: ignore[no-untyped-call]
    with contextlib.suppress(Exception):
        subject.put(start[:1].expand(size), target, non_blocking=late)
    del start
    subject.synchronize_all()
    gc.collect()
    words = f"a move from {place_name(source)} to device {target} that had no room"
    assert alive.expired(), f"OOM-004: {words} keeps its source"  # type: ignore[no-untyped-call]
    for i, was in before.items():
        found = allocated(subject, i)
        assert found <= was, f"OOM-004: {words} left {found - was} bytes on device {i}"
