"""Gradients through moves: of every dtype and layout, however they come in, in every situation."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import REAL_FLOATS, all_bits, same_bits, short_name
from anydevice_conformance.moves import Move, Place, make_source, place_name
from anydevice_conformance.moving import assert_gradient, read
from anydevice_conformance.situations import Situation, restored, run_in, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["check_gradients"]

_FORMS: Final = (
    ((), "contiguous"),
    ((5, 7), "contiguous"),
    ((6, 4), "transposed"),
    ((2, 3, 4), "permuted"),
    ((2, 3, 4, 5), "channels-last"),
    ((9, 6), "narrowed"),
    ((3, 4), "expanded"),
    ((4099,), "contiguous"),
)
#: How the gradient comes in lies in memory.
_INCOMING: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "dense": lambda given: given,
    "expanded": lambda given: given.flatten()[:1].reshape((1,) * given.dim()).expand(given.shape),
    "transposed": lambda given: given.mT.contiguous().mT if given.dim() > 1 else given,
}


def check_gradients(subject: Subject, source: Place, target: Place) -> None:
    """First and second derivatives, which go the other way; of results that go on, too.

    Raises:
        AssertionError: one is wrong; the message says which.
    """
    crosses = source is not None and target is not None
    if subject.is_host or (crosses and not subject.capabilities.streams):
        return  # torch orders a backward between devices by their events
    dtypes = subject.supported(*REAL_FLOATS, torch.complex64)
    graded = [s for s in covering_situations(subject) if s.mode == "enable_grad"]
    cases = list(itertools.product(dtypes, _FORMS, _INCOMING, (False, True), (False, True)))
    random.Random(subject.seed).shuffle(cases)
    for number, situation in enumerate(graded or [Situation()]):
        share = cases[number :: len(graded)] if not subject.quick else cases[number::34]

        with restored(subject):
            run_in(subject, situation, partial(_share, subject, share, situation, source, target))
    for dtype in [d for d in dtypes if d in (torch.float32, torch.float64)]:
        for kind in ("requires_grad", "parameter"):
            move = _move(dtype, (5, 7), "contiguous", source, target, False, kind)
            words = f"MOV-011: of a {kind} of {short_name(dtype)}, "
            words += f"from {place_name(source)} to {place_name(target)}"
            _named(words, partial(_others, subject, move))


def _share(
    subject: Subject,
    share: list[tuple[torch.dtype, tuple[tuple[int, ...], str], str, bool, bool]],
    situation: Situation,
    source: Place,
    target: Place,
) -> None:
    for dtype, (shape, layout), incoming, late, further in share:
        move = _move(dtype, shape, layout, source, target, late)
        words = f"MOV-011: {incoming} gradient, {move!r}, {situation!r}"
        words += ", of what was computed" * further
        _named(words, partial(_first, subject, move, incoming, further))


def _named(words: str, check: Callable[[], object]) -> None:
    try:
        check()
    except Exception as error:
        raise AssertionError(f"{words}: {error}") from error


def _move(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    layout: str,
    source: Place,
    target: Place,
    late: bool,
    kind: str = "requires_grad",
) -> Move:
    return Move(
        dtype=dtype,
        shape=shape,
        layout=layout,
        offset=0,
        source=source,
        target=target,
        non_blocking=late,
        pinned=False,
        kind=kind,
        situation=Situation(),
        seed=0,
    )


def _place(subject: Subject, place: Place) -> torch.device:
    return torch.device("cpu") if place is None else subject.device(place)


def _first(subject: Subject, move: Move, incoming: str, further: bool) -> None:
    leaf = make_source(subject, move).tensor
    source = leaf.view_as(leaf) if further else leaf
    given = all_bits(move.dtype, *move.shape, seed=len(move.shape) + 17)
    with surroundings(subject):
        moved = subject.backend.move(
            source, _place(subject, move.target), non_blocking=move.non_blocking
        )
    assert moved.requires_grad, "the result requires no gradient"
    there = _INCOMING[incoming](given.to(moved.device))
    (found,) = torch.autograd.grad(moved, leaf, there)
    assert found.device == leaf.device, f"the gradient is on {found.device}"
    assert found.dtype is leaf.dtype, f"the gradient is {found.dtype}"
    assert same_bits(read(found), _INCOMING[incoming](given)), "a wrong gradient came back"


def _others(subject: Subject, move: Move) -> None:
    """Second derivatives; of what goes on; added up; and moved while it comes back."""
    backend, there = subject.backend, _place(subject, move.target)
    leaf = make_source(subject, move).tensor
    assert_gradient(subject, move, leaf, there)
    moved = backend.move(leaf * 2, there)
    (found,) = torch.autograd.grad(moved, leaf, torch.ones_like(moved))
    assert read(found).eq(2).all(), "the gradient of what is moved further is wrong"
    passed: list[torch.Tensor] = []

    def go_on(given: torch.Tensor) -> None:
        passed.append(backend.move(given, leaf.device))

    for turn in (1, 2):
        moved = backend.move(leaf, there)
        moved.register_hook(go_on)  # type: ignore[no-untyped-call]
        both = moved * 2 + backend.move(leaf, there, non_blocking=True) * 3
        torch.autograd.backward(both, torch.ones_like(both))
        assert leaf.grad is not None, "no gradient came back"
        assert read(leaf.grad).eq(5 * turn).all(), "gradients of two moves do not add up"
    assert all(read(given).eq(2).all() for given in passed), "in a backward a move is wrong"
