"""MOV: moves of every kind, in every situation."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import torch

from anydevice_conformance.holdings import nothing_kept
from anydevice_conformance.laws import hold
from anydevice_conformance.marks import two_devices
from anydevice_conformance.moves import Move, moves
from anydevice_conformance.moving import check_move
from anydevice_conformance.subject import Subject
from anydevice_conformance.sweeps import sweep

#: The last so many tensors may be kept until a copy is known to be done.
_IN_FLIGHT = 16


def test_MOV_025_every_move(subject: Subject) -> None:
    """Every move to the device, back, or to where the tensor is, is right in every situation.

    Found: one combination of dtype, shape, layout, size, direction, stream, thread and current
    device goes wrong; the counterexample is the smallest one found.
    Fix: see the paragraph that the message names; leave the special case out that is at fault.
    """
    _hold(subject, moves(subject), examples=210 if subject.quick else 700)


@two_devices
def test_MOV_026_every_move_between_devices(subject: Subject) -> None:
    """Every move between two devices is right in every situation.

    Found: one combination of dtype, shape, layout, size, direction, stream, thread and current
    device goes wrong; the counterexample is the smallest one found.
    Fix: see the paragraph that the message names; copies between devices need all that copies from
    the host need: strides, offsets, the streams of both sides, gradients.
    """
    _hold(subject, moves(subject, between=True), examples=250 if subject.quick else 500)


def test_MOV_025_every_combination(subject: Subject) -> None:
    """Every dtype in every layout moves to the device and back, blocking or not.

    Found: one combination of dtype, shape, layout and direction goes wrong; the message says which.
    Fix: see the paragraph that the message names; leave the special case out that is at fault.
    """
    sweep(subject, between=False)


@two_devices
def test_MOV_026_every_combination_between_devices(subject: Subject) -> None:
    """Every dtype in every layout moves between two devices, both ways, blocking or not.

    Found: one combination of dtype, shape, layout and direction goes wrong; the message says which.
    Fix: see the paragraph that the message names; leave the special case out that is at fault.
    """
    sweep(subject, between=True)


def _hold(subject: Subject, situations, examples: int) -> None:  # type: ignore[no-untyped-def]
    alive: list[Callable[[], torch.Tensor | None]] = []

    def law(move: Move) -> None:
        check_move(subject, move, lambda tensor: alive.append(weakref.ref(tensor)))

    with nothing_kept(subject, "moves in many situations"):
        hold(subject, situations, law, examples=examples)
    subject.synchronize_all()
    gc.collect()
    kept = sum(tensor() is not None for tensor in alive[:-_IN_FLIGHT])
    assert not kept, (
        f"MOV-009, MEM-014: after {len(alive)} tensors were moved, {kept} are kept by the backend"
    )
