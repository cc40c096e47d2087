"""Moves of views of every form: sizes of one, gaps in any dimension, wide rows, pending signs.

Where a size is one its stride says nothing, and drivers take a layout for another. Views of wide
matrices are copied row by row, by calls that keep widths, pitches and heights in few bits.
"""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import same_bits, short_name
from anydevice_conformance.holdings import allocated
from anydevice_conformance.ladders import random_bytes
from anydevice_conformance.layouts import LAYOUTS, is_dense, overlaps
from anydevice_conformance.moves import Place, place_name
from anydevice_conformance.moving import read
from anydevice_conformance.situations import MODES, Situation, restored, run_in, surroundings
from anydevice_conformance.subject import Subject

__all__ = ["check_forms"]

#: What a form is: shape, strides and offset of a view.
_Form = tuple[tuple[int, ...], tuple[int, ...], int]
#: Other sizes than one, of each dimension.
_SIZES: Final = (3, 5, 4, 2, 6)
_DIMENSIONS: Final = 5
#: The dtypes that take turns: of each number of bytes one.
_DTYPES: Final = (torch.uint8, torch.float32, torch.bfloat16, torch.float64)
#: The last so many copies may be kept until they are known to be done.
_IN_FLIGHT: Final = 16
#: Rows above 64 KiB, more than 65,535 rows, and wide gaps between them.
_WIDE: Final[tuple[_Form, ...]] = (
    ((3, 70_001), (70_004, 1), 1),
    ((2, 70_000), (70_000, 1), 0),
    ((70_001, 3), (5, 1), 2),
    ((70_001, 3), (1, 70_002), 0),
    ((3, 70_001), (1, 4), 1),
    ((5, 100), (150_001, 1), 3),
    ((3, 9_001), (131_072, 1), 0),
    ((2, 3, 20_003), (200_000, 20_010, 1), 0),
    ((3, 2, 70_001), (70_003, 280_000, 1), 0),
    ((1, 70_001), (3, 1), 0),
    ((70_001, 1), (2, 7), 0),
    ((3, 250, 300), (1, 900, 3), 0),
    ((250, 300, 3), (300, 1, 75_000), 0),
    ((2, 3, 150, 160), (144_000, 1, 960, 6), 0),
    ((70_001,), (7,), 5),
    ((9_001,), (64,), 0),
    ((33_000, 2), (16, 2), 1),
    ((3, 40_001), (0, 1), 0),
    ((40_001, 3), (1, 0), 0),
    ((300, 301), (302, 1), 4),
)


def _of_ones() -> Iterator[_Form]:
    """Each layout in each shape some of whose sizes are one; up to four dimensions all orders."""
    for dims in range(1, _DIMENSIONS + 1):
        for shape in itertools.product(*((1, size) for size in _SIZES[:dims])):
            if 1 not in shape:
                continue
            orders = list(itertools.permutations(range(dims)))
            for order in orders if dims < 4 else orders[:: 5 if dims == 4 else 29]:
                yield shape, _strides(shape, order), 0


def _strides(shape: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    """Dense: those of the first dimension in ``order`` are the largest."""
    strides, step = [0] * len(shape), 1
    for place in reversed(order):
        strides[place] = step
        step *= shape[place]
    return tuple(strides)


def _layouts_of_ones() -> Iterator[_Form]:
    """Each named layout, dense or not, in such shapes."""
    flat = torch.empty(1 << 14, dtype=torch.uint8, device="cpu")
    for dims in range(1, _DIMENSIONS + 1):
        for shape in itertools.product(*((1, size) for size in _SIZES[:dims])):
            for build in LAYOUTS.values() if 1 in shape else ():
                made = build(shape)
                if made is not None:
                    view = made[1](flat[3 : 3 + made[0]])
                    yield shape, view.stride(), 3


def _of_gaps() -> Iterator[_Form]:
    """Dense in each order, but for one or two dimensions that are expanded, stepped or padded."""
    for dims in range(1, 5):
        shape = _SIZES[:dims]
        for order in list(itertools.permutations(range(dims)))[:: 1 if dims < 4 else 5]:
            for odd in itertools.chain(*(itertools.combinations(range(dims), n) for n in (1, 2))):
                for gap in ("expanded", "stepped", "padded"):
                    yield shape, _with_gaps(shape, order, odd, gap), 1


def _with_gaps(
    shape: tuple[int, ...], order: tuple[int, ...], odd: tuple[int, ...], gap: str
) -> tuple[int, ...]:
    strides, step = [0] * len(shape), 1
    for place in reversed(order):
        if place in odd and gap == "expanded":
            continue
        strides[place] = step * (2 if place in odd and gap == "stepped" else 1)
        step = strides[place] * shape[place] + (place in odd and gap == "padded")
    return tuple(strides)


def _small(quick: bool, turn: int) -> list[_Form]:
    forms = list(dict.fromkeys((*_of_ones(), *_layouts_of_ones(), *_of_gaps())))
    return forms[turn % 3 :: 3] if quick else forms


def check_forms(subject: Subject, source: Place, target: Place, turn: int) -> None:
    """Move all forms from one place to another, and hold values, strides and places against them.

    Raises:
        AssertionError: one is wrong; the message says which.
    """
    places = [place for place in (source, target) if place is not None]
    if subject.is_host or not subject.strided or min(map(subject.room, places)) < 24 << 20:
        return
    dtypes, every = subject.supported(*_DTYPES), covering_situations(subject)
    before = {i: allocated(subject, i) for i in subject.indices}
    for number, forms in enumerate((_small(subject.quick, turn), list(_WIDE))):
        for part in range(4):
            dtype = dtypes[(turn + part) % len(dtypes)]
            situation = every[(turn * 7 + part * 3 + number) % len(every)]
            share = forms[part::4]
            if number and not subject.quick:
                share = forms  # in each of the dtypes
            words = f"{short_name(dtype)} from {place_name(source)} to {place_name(target)}"

            def work(
                dtype: torch.dtype = dtype,
                share: list[_Form] = share,
                words: str = f"{words}; {situation!r}",
            ) -> None:
                for late in (False, True):
                    _move_all(subject, (source, target), share[late::2], dtype, late, words)
                    if not subject.quick:
                        _move_all(subject, (source, target), share[late::2], dtype, not late, words)

            with restored(subject):
                run_in(subject, situation, work)
    _check_signs(subject, source, target, turn)
    _assert_nothing_kept(subject, source, target, before)


def _check_signs(subject: Subject, source: Place, target: Place, turn: int) -> None:
    """The small forms with a pending conjugation or sign, in each gradient mode."""
    ways = [d for d in (torch.complex64, torch.float64) if subject.supported(d, d.to_complex())[1:]]
    modes = [mode for mode in MODES if mode != "inference_mode" or subject.infers]
    index = target if target is not None else source or 0
    for number, (dtype, mode) in enumerate(itertools.product(ways, modes)):
        words = f"{short_name(dtype)}, sign pending, from {place_name(source)} to "
        words += f"{place_name(target)}; {mode}"
        forms = _small(True, turn + number)[:: 2 if subject.quick else 1]
        with restored(subject):
            for late in (False, True):
                run_in(
                    subject,
                    Situation(index, mode=mode),
                    partial(
                        _move_all,
                        subject,
                        (source, target),
                        forms[late::2],
                        dtype,
                        late,
                        words,
                        True,
                    ),
                )


def _assert_nothing_kept(
    subject: Subject, source: Place, target: Place, before: dict[int, int]
) -> None:
    """No device has more in tensors than one buffer for all, as large as the largest."""
    here, there = (
        torch.device("cpu") if place is None else subject.device(place)
        for place in (source, target)
    )
    start = torch.ones(2).to(here)
    for _ in range(_IN_FLIGHT + 1):  # the last few copies may be kept until the next ones
        subject.backend.move(start, there, non_blocking=True)
    del start
    subject.synchronize_all()
    gc.collect()
    grown = {i: allocated(subject, i) - was for i, was in before.items()}
    most = max(math.prod(form[0]) for form in _WIDE) * 8 + (64 << 10)
    assert max(grown.values()) <= most, (
        f"MEM-014: after moves of {len(_WIDE)} wide forms and many small ones from "
        f"{place_name(source)} to {place_name(target)}, all gone, devices have {grown} bytes more"
    )


def _move_all(
    subject: Subject,
    way: tuple[Place, Place],
    forms: list[_Form],
    dtype: torch.dtype,
    late: bool,
    words: str,
    signed: bool = False,
) -> None:
    here, there = (torch.device("cpu") if place is None else subject.device(place) for place in way)
    count = max((_extent(form) for form in forms), default=0)
    values = random_bytes(subject, count * dtype.itemsize).clone().view(dtype)
    if signed:  # whose signs may be changed
        values = random_bytes(subject, count).to(dtype) * (1 + 2j if dtype.is_complex else 1)
    storage = values.to(here)
    checks: list[Callable[[], None]] = []
    for form in forms:
        part, expected = storage.as_strided(*form), values.as_strided(*form)
        if signed:
            part, expected = _signed(part), _signed(expected)
        with surroundings(subject):
            moved = subject.backend.move(part, there, non_blocking=late)
        told = f"a view of shape, strides and offset {form}, {words}{', non-blocking' * late}"
        checks.append(partial(_assert_right, expected, part, moved, told))
        if len(checks) >= (9 if count > 1 << 16 else 200):
            _end(subject, checks)
    _end(subject, checks)
    assert same_bits(read(storage), values), f"MOV-009: moving views of it changed {words}"


def _signed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.conj() if tensor.is_complex() else torch._neg_view(tensor)


def _end(subject: Subject, checks: list[Callable[[], None]]) -> None:
    subject.synchronize_all()
    for check in checks:
        check()
    checks.clear()


def _extent(form: _Form) -> int:
    shape, strides, offset = form
    return offset + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _assert_right(
    expected: torch.Tensor, source: torch.Tensor, moved: torch.Tensor, words: str
) -> None:
    assert moved.dtype is source.dtype, f"MOV-001: became {moved.dtype}: {words}"
    assert moved.shape == source.shape, f"MOV-001: became {tuple(moved.shape)}: {words}"
    assert same_bits(read(moved), read(expected)), f"MOV-001: the values changed: {words}"
    assert moved.stride() == source.stride() or not is_dense(source), (
        f"MOV-007: strides became {moved.stride()}: {words}"
    )
    assert not overlaps(moved), (
        f"MOV-025: elements of the result share their memory, strides {moved.stride()}: {words}"
    )
