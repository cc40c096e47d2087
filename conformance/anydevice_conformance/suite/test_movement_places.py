"""MOV: where a move leads."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import torch

from anydevice import registry
from anydevice.devices import parse_device
from anydevice.tensors import send_to_device
from anydevice_conformance.data import same_bits, sample
from anydevice_conformance.marks import two_devices
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.situations import Situation, run_in, state
from anydevice_conformance.subject import Subject
from anydevice_conformance.work import long_work


def test_MOV_004_lands_where_asked(subject: Subject) -> None:
    """The result is on the device, type and index, that was asked for, and back on the host.

    Found: the index was ignored, or the result is elsewhere.
    Fix: pass the whole `torch.device` on: ``tensor.to(device)``.
    """
    for index in subject.indices:
        for non_blocking in (False, True):
            there = subject.put(torch.ones(3), index, non_blocking=non_blocking)
            assert subject.is_on(there, index), f"asked for index {index}, is on {there.device}"
            back = subject.fetch(there)
            assert back.device.type == "cpu", f"asked for the host, is on {back.device}"
    if subject.is_host:
        return
    before, beyond = state(subject), len(subject.indices)
    for source in (torch.ones(3), torch.ones(0), torch.ones(3, device=subject.device(0))):
        for non_blocking in (False, True):
            try:
                moved = subject.put(source, beyond, non_blocking=non_blocking)
            except Exception:  # noqa: BLE001 - whichever the device raises
                continue
            raise AssertionError(f"device {beyond} is not there, and led to {moved.device}")
    changed = before.differences(state(subject))
    assert not changed, f"DEV-012: a move to a device that is not there: {changed}"


@two_devices
def test_MOV_017_between_devices(subject: Subject) -> None:
    """A move between two devices is exact, after earlier work and before later work.

    Found: values changed, arrived too late, or stayed on the first device.
    Fix: order the copy on both devices' current streams, or go over the host and wait.
    """
    for here, there in subject.both_ways():
        for dtype in subject.supported(torch.float32, torch.int64, torch.bfloat16):
            source = sample(dtype, 33, 9).t()
            moved = subject.put(subject.put(source, here), there)
            assert subject.is_on(moved, there), f"asked for {there}, is on {moved.device}"
            assert moved.dtype is dtype, f"{dtype} became {moved.dtype}"
            assert same_bits(subject.fetch(moved), source), f"{dtype} changed between devices"
        work = long_work(subject, here)
        for non_blocking in (False, True):
            moved = subject.put(work.run(), there, non_blocking=non_blocking)
            found = subject.fetch(moved + 1)
            assert torch.equal(found, work.pattern + 1), (
                f"from {here} to {there}, non_blocking={non_blocking}: not ordered"
            )


@two_devices
def test_MOV_017_gradients_between_devices(subject: Subject) -> None:
    """Backward through a move between two devices reaches the source.

    Found: no gradient, or a wrong one.
    Fix: use a differentiable copy (``tensor.to``). Torch needs the device's events for this; a
    device that claims no streams, and raises, is let off.
    """
    for here, there in subject.both_ways():
        leaf = subject.put(torch.ones(3), here).detach().requires_grad_()
        try:
            torch.autograd.backward((subject.put(leaf, there) * 2).sum())
        except RuntimeError as error:
            if subject.capabilities.streams or not subject.put(leaf, there).requires_grad:
                raise
            not_claimed(f"without streams no gradient crosses devices: {error}")
        assert leaf.grad is not None, "no gradient came back between devices"
        assert subject.fetch(leaf.grad).tolist() == [2.0] * 3


def test_MOV_018_index_spellings(subject: Subject) -> None:
    """Every spelling of a device names the same one.

    Found: a spelling led elsewhere, or was refused.
    Fix: `move` gets a `torch.device`; treat one without an index as index 0.
    """
    kind, data = subject.type, torch.ones(2)
    for index in subject.indices:
        spellings: list[object] = [subject.device(index), str(subject.device(index))]
        if not subject.is_host:
            spellings += [parse_device(f"{kind}:{index}")]
        if registry.primary_type() == kind:
            spellings += [index, str(index)]
        if index == 0:
            spellings += [kind, torch.device(kind)]
        for spelling in spellings:
            moved = send_to_device(data, spelling)  # type: ignore[arg-type]
            assert subject.is_on(moved, index), f"{spelling!r} led to {moved.device}"
            direct = subject.backend.move(data, parse_device(spelling).torch)  # type: ignore[arg-type]
            assert subject.is_on(direct, index), f"{spelling!r} led move to {direct.device}"
    others = [Situation(0, i, side) for i in subject.indices for side in (False, True)]
    for situation in others if subject.capabilities.streams else others[::2]:
        run_in(subject, situation, lambda situation=situation: _assert_bare(subject, situation))  # type: ignore[misc]


def _assert_bare(subject: Subject, situation: Situation) -> None:
    """The type alone is device 0 whichever is current, from wherever a tensor comes."""
    bare, data = torch.device(subject.type), torch.arange(3.0)
    sources = [data, *(data.to(subject.device(index)) for index in subject.indices)]
    for source in sources:
        for late in (False, True):
            moved = subject.backend.move(source, bare, non_blocking=late)
            assert subject.is_on(moved, 0), (
                f"from {source.device} a device without an index led move to {moved.device}; "
                f"{situation!r}"
            )
            assert torch.equal(moved.cpu(), data), f"a move to {bare!s} changed values"
