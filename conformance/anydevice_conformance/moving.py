"""A generated move, done and held against all that the specification says of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anydevice_conformance.data import same_bits
from anydevice_conformance.layouts import is_dense, overlaps
from anydevice_conformance.moves import Move, make_source
from anydevice_conformance.situations import restored, run_in, state, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["assert_gradient", "check_move", "check_pinning", "flags_of", "read"]


def check_move(subject: Subject, move: Move, note: Callable[[torch.Tensor], object]) -> None:
    """Do a move and hold it against all that the specification says of it.

    Args:
        subject: whose.
        move: which.
        note: is told each source and each result, to see later whether it is still alive.

    Raises:
        AssertionError: a paragraph is broken; its id stands first.
    """
    places = [place for place in (move.source, move.target) if place is not None]
    if move.bytes > 1 << 20 and any(move.bytes * 8 > subject.room(place) for place in places):
        return
    with restored(subject):
        run_in(subject, move.situation, lambda: _check(subject, move, note))


def _check(subject: Subject, move: Move, note: Callable[[torch.Tensor], object]) -> None:
    made = make_source(subject, move)
    source, expected = made.tensor, made.expected
    target = torch.device("cpu") if move.target is None else subject.device(move.target)
    if move.bare and target.type != "cpu":
        target = torch.device(target.type)
    flags, before = flags_of(source), state(subject)
    try:
        with surroundings(subject):
            moved = subject.backend.move(source, target, non_blocking=move.non_blocking)
    except Exception as error:
        raise AssertionError(f"MOV: the move raised {type(error).__name__}: {error}") from error
    changed = before.differences(state(subject))
    assert not changed, f"DEV-012: {changed}"
    now = flags_of(source)
    assert now == flags, f"MOV-009: the source was {flags}, and is {now}"
    note(source)
    if move.source == move.target or subject.is_host:
        assert moved is source, "MOV-010: what is there already came back as another tensor"
        return
    note(moved)
    _assert_form(subject, move, source, moved)
    if move.target is None and move.non_blocking:
        subject.backend.synchronize(move.source or 0)
    assert same_bits(read(moved), expected), f"MOV-001: the values changed {move.direction}"
    if move.source is not None or not move.non_blocking:
        made.assert_kept()  # else the copy may still read it: nothing says when it is done
    _assert_apart(subject, move, source, moved, expected, target)
    if move.kind in ("requires_grad", "parameter") and torch.is_grad_enabled():
        assert_gradient(subject, move, source, target)


def flags_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor a move must leave as it was, but for its values."""
    return (
        type(tensor).__name__,
        tensor.device,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        f"requires_grad={tensor.requires_grad}",
        f"leaf={tensor.is_leaf}",
        "" if tensor.is_inference() else f"version={tensor._version}",
    )


def check_pinning(subject: Subject, move: Move) -> None:
    """Pin a source, and move the result.

    Raises:
        AssertionError: a paragraph is broken.
    """
    if move.bytes > 1 << 20 and move.bytes * 3 > subject.room(move.target or 0):
        return
    with restored(subject):
        run_in(subject, move.situation, lambda: _check_pinning(subject, move))


def _check_pinning(subject: Subject, move: Move) -> None:
    made = make_source(subject, move)
    source = made.tensor
    if source.is_complex() and source.requires_grad:
        source = source.detach()  # torch pins none that requires grad
    flags, before = flags_of(source), state(subject)
    with surroundings(subject):
        pinned = subject.backend.pin_memory(source)
    changed = before.differences(state(subject))
    assert not changed, f"DEV-012: {changed}"
    assert flags_of(source) == flags, f"the source was {flags}, and is {flags_of(source)}"
    made.assert_kept()
    assert pinned.device.type == "cpu", f"the result is on {pinned.device}"
    assert same_bits(pinned, made.expected), "pinning changed values, dtype or shape"
    if pinned.numel() == 0:
        return
    assert pinned.is_pinned(), "the result is not pinned"
    assert pinned.is_inference() == torch.is_inference_mode_enabled() or source.is_pinned(), (
        f"PIN-001: is_inference() is {pinned.is_inference()} of what was pinned"
    )
    assert pinned.stride() == source.stride() or not is_dense(source), (
        f"PIN-005: strides {source.stride()} became {pinned.stride()}"
    )
    pinned = pinned.detach()  # a view that requires grad is not written to
    there = subject.put(pinned, move.target or 0, non_blocking=move.non_blocking)
    assert same_bits(read(there), made.expected), "what was pinned moved as something else"
    subject.synchronize_all()
    again = subject.backend.pin_memory(source)
    with torch.inference_mode(pinned.is_inference()), torch.no_grad():
        pinned.resolve_conj().resolve_neg().zero_() if is_dense(pinned) else None
    made.assert_kept()
    assert same_bits(again, made.expected), "two pinned copies of one tensor share their memory"


def _assert_form(subject: Subject, move: Move, source: torch.Tensor, moved: torch.Tensor) -> None:
    assert isinstance(moved, torch.Tensor), f"MOV-024: got {type(moved).__name__}, no tensor"
    place = moved.device.type == "cpu" if move.target is None else subject.is_on(moved, move.target)
    assert place, f"MOV-004: {move.direction}, the result is on {moved.device}"
    assert moved.dtype is source.dtype, f"MOV-001: {source.dtype} became {moved.dtype}"
    assert moved.shape == source.shape, f"MOV-001: {source.shape} became {moved.shape}"
    if source.numel() and is_dense(source) and subject.strided:
        assert moved.stride() == source.stride(), (
            f"MOV-007: strides {source.stride()} became {moved.stride()}"
        )
    if subject.strided:
        assert not overlaps(moved), (
            f"MOV-025: elements of the result share their memory, strides {moved.stride()}"
        )
    assert moved.is_inference() == torch.is_inference_mode_enabled(), (
        f"MOV-024: is_inference() is {moved.is_inference()}, where the mode is "
        f"{torch.is_inference_mode_enabled()}"
    )
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        assert moved.requires_grad == source.requires_grad, (
            f"MOV-011: requires_grad={source.requires_grad} became {moved.requires_grad}"
        )
    else:
        assert source.requires_grad or not moved.requires_grad, "MOV-011: a gradient is asked for"


def read(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, by torch's own blocking copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if plain.device.type == "cpu" else plain.cpu()


def _assert_apart(
    subject: Subject,
    move: Move,
    source: torch.Tensor,
    moved: torch.Tensor,
    expected: torch.Tensor,
    target: torch.device,
) -> None:
    """Two moves of one source give two tensors, and what is written to one shows nowhere else."""
    if moved.numel() == 0 or move.seed % 2:
        return
    again = subject.backend.move(source, target)
    plain = moved.detach() if moved.requires_grad else moved
    with torch.inference_mode(plain.is_inference()), torch.no_grad():
        plain.zero_() if is_dense(plain) else None
    assert same_bits(read(again), expected), "MOV-008: two moves of one source share their memory"
    assert same_bits(read(source), expected), "MOV-008: the result shares the source's memory"


def assert_gradient(
    subject: Subject, move: Move, source: torch.Tensor, target: torch.device
) -> None:
    """Whether gradients come back through a move; where the seed is a multiple of 4, second ones.

    Raises:
        AssertionError: they do not.
    """
    crosses = move.source is not None and move.target is not None
    if crosses and not subject.capabilities.streams:
        return  # torch orders a backward between devices by their events
    moved = subject.backend.move(source, target, non_blocking=move.non_blocking)
    bits = _gradient_values(move)
    given = bits.to(moved.device).reshape(move.shape)
    (gradient,) = torch.autograd.grad(moved, source, given, allow_unused=True)
    assert gradient is not None, "MOV-011: no gradient came back"
    assert gradient.device == source.device, f"MOV-011: the gradient is on {gradient.device}"
    assert gradient.dtype is source.dtype, f"MOV-011: the gradient is {gradient.dtype}"
    assert same_bits(read(gradient), bits.reshape(move.shape)), (
        "MOV-011: a wrong gradient came back"
    )
    if move.seed % 4 == 0 and source.numel() and not source.is_complex():  # and a second derivative
        moved = subject.backend.move(source, target, non_blocking=move.non_blocking)
        scale = torch.ones((), dtype=moved.dtype, device=moved.device)
        (first,) = torch.autograd.grad((moved * moved * scale).sum(), source, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), source)
        two = torch.full(move.shape, 2.0, dtype=move.dtype)
        assert same_bits(read(second).contiguous(), two), "MOV-011: a second derivative is wrong"


def _gradient_values(move: Move) -> torch.Tensor:
    """Numbers that use all digits of their dtype."""
    generator = torch.Generator().manual_seed(move.seed)
    count = max(1, math.prod(move.shape))
    dtype = torch.complex128 if move.dtype.is_complex else torch.float64
    return torch.randn(count, generator=generator, dtype=dtype)[: math.prod(move.shape)].to(
        move.dtype
    )
