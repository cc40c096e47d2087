"""Generated moves: what is moved, how it lies in memory, where to, and in what situation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import torch
from hypothesis import strategies as st
from torch import nn

from anydevice_conformance.data import DTYPES, same_bits, short_name
from anydevice_conformance.situations import (
    Situation,
    restored,
    run_in,
    situations,
    state,
)
from anydevice_conformance.subject import Subject

__all__ = ["LAYOUTS", "Move", "check_move", "moves"]

Place = int | None  # a device's index; None is the host

_HUGE: Final = ((1_048_583,), (1024, 1029), (3, 5, 70_001))
_MIDDLING: Final = ((4095,), (4096,), (4097,), (64, 64), (65_537,), (3, 11, 1000), (2, 3, 31, 33))
_EMPTY: Final = ((0,), (3, 0, 2), (2, 1, 0, 3))
#: How many elements lie before and behind a source in its storage.
_MARGIN: Final = 19


@dataclasses.dataclass(frozen=True)
class Move:
    """A move, whole.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        layout: a key of `LAYOUTS`.
        offset: elements before it in its storage.
        source: a device's index, or None for the host.
        target: as ``source``.
        non_blocking: as `move` gets it.
        pinned: whether a host source is page-locked.
        kind: ``plain``, ``requires_grad``, ``parameter``, ``inference``, ``conjugate`` or
            ``negative``.
        situation: where it is called.
        seed: of the values.
        bare: whether the target, device 0, is named without its index.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: str
    offset: int
    source: Place
    target: Place
    non_blocking: bool
    pinned: bool
    kind: str
    situation: Situation
    seed: int
    bare: bool = False

    @property
    def direction(self) -> str:
        """In words."""
        names = ["the host" if p is None else f"device {p}" for p in (self.source, self.target)]
        return f"from {names[0]} to {names[1]}"

    def __repr__(self) -> str:
        words = [
            f"{short_name(self.dtype)} {self.shape}",
            self.layout if not self.offset else f"{self.layout}, {self.offset} elements in",
            self.direction,
            "non-blocking" if self.non_blocking else "blocking",
        ]
        if self.bare:
            words.append("named without its index")
        if self.pinned:
            words.append("pinned")
        if self.kind != "plain":
            words.append(self.kind)
        return f"<move of {', '.join(words)}; {str(self.situation)[1:-1]}>"


# ---------------------------------------------------------------------- layouts

Build = Callable[[tuple[int, ...]], "tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None"]


def _contiguous(shape: tuple[int, ...]) -> Any:
    return math.prod(shape), lambda flat: flat.view(shape)


def _transposed(shape: tuple[int, ...]) -> Any:
    if len(shape) < 2:
        return None
    order = tuple(reversed(range(len(shape))))
    return math.prod(shape), lambda flat: flat.view(shape[::-1]).permute(order)


def _channels_last(shape: tuple[int, ...]) -> Any:
    if len(shape) not in (4, 5):
        return None
    back = (0, len(shape) - 1, *range(1, len(shape) - 1))
    return math.prod(shape), lambda flat: flat.view(shape[0], *shape[2:], shape[1]).permute(back)


def _stepped(shape: tuple[int, ...]) -> Any:
    return 2 * math.prod(shape), lambda flat: flat.view(*shape, 2)[..., 0]


def _narrowed(shape: tuple[int, ...]) -> Any:
    if not shape:
        return None
    wide = (*shape[:-1], shape[-1] + 3)
    return math.prod(wide), lambda flat: flat.view(wide)[..., 1 : 1 + shape[-1]]


def _expanded(shape: tuple[int, ...]) -> Any:
    if not shape or not shape[-1]:
        return None
    return math.prod(shape[:-1]), lambda flat: flat.view(*shape[:-1], 1).expand(shape)


def _overlapping(shape: tuple[int, ...]) -> Any:
    if len(shape) != 2 or 0 in shape or shape[1] < 2:
        return None
    rows, columns = shape
    step = max(1, columns // 2)
    return (rows - 1) * step + columns, lambda flat: flat.unfold(0, columns, step)


#: Name to a function of the shape, which gives how many elements the storage has, and the view of
#: a flat tensor of so many; None where the layout has no such shape.
LAYOUTS: Final[dict[str, Build]] = {
    "contiguous": _contiguous,
    "transposed": _transposed,
    "channels-last": _channels_last,
    "stepped": _stepped,
    "narrowed": _narrowed,
    "expanded": _expanded,
    "overlapping": _overlapping,
}


# ---------------------------------------------------------------------- generating


def moves(subject: Subject, *, between: bool = False) -> st.SearchStrategy[Move]:
    """Moves to the device, back, on the device itself; or all of them ``between`` two devices."""
    # Made once: drawing is most of what an example costs.
    kinds = {dtype: tuple(_kinds(dtype, subject)) for dtype in subject.supported(*DTYPES)}
    layouts = list(LAYOUTS)
    pins = subject.capabilities.pinned_memory
    routes: list[tuple[Place, Place]]
    if between:
        routes = [(a, b) for a in subject.indices for b in subject.indices if a != b]
    else:
        routes = [(None, 0), (0, None), (None, 0), (0, 0)]

    def build(
        dtype: torch.dtype,
        shape: tuple[int, ...],
        layout: str,
        route: tuple[Place, Place],
        dice: int,
        situation: Situation,
    ) -> Move:
        place = situation.index
        source, target = route
        if not between:
            source, target = (p if p is None else place for p in route)
        if len(shape) in (4, 5) and dice % 3 == 0:
            layout = "channels-last"
        if LAYOUTS[layout](shape) is None:
            layout = "contiguous" if dice % 2 or len(shape) < 2 else "transposed"
        return Move(
            dtype,
            shape,
            layout,
            (0, 0, 1, 3, 16)[dice // 4 % 5],
            source,
            target,
            bool(dice & 1),
            pins and source is None and bool(dice & 2),
            kinds[dtype][dice // 20 % len(kinds[dtype])],
            dataclasses.replace(situation, index=source if source is not None else target or 0),
            dice // 400,
            bare=target == 0 and dice // 400 % 3 == 1,
        )

    return st.builds(
        build,
        st.sampled_from(list(kinds)),
        _shapes(),
        st.sampled_from(layouts),
        st.sampled_from(routes),
        st.integers(0, 3999),
        situations(subject),
    )


def _shapes() -> st.SearchStrategy[tuple[int, ...]]:
    """Each number of dimensions is as frequent as the others."""

    def build(dims: int, dice: int) -> tuple[int, ...]:
        if dims < 7:
            return tuple((1, 2, 3, 5, 4, 7)[dice // 6**place % 6] for place in range(dims))
        if dims < 9:
            return _MIDDLING[dice % len(_MIDDLING)]
        return (_EMPTY + _HUGE)[dice % len(_EMPTY + _HUGE)]

    return st.builds(build, st.integers(0, 9), st.integers(0, 6**6 - 1))


def _kinds(dtype: torch.dtype, subject: Subject) -> list[str]:
    kinds = ["plain", "plain"] + (["inference"] if subject.infers else [])
    if dtype.is_floating_point and dtype.itemsize > 1:
        kinds += ["requires_grad", "parameter"]
    if dtype.is_complex:
        kinds += ["conjugate", "requires_grad"]
    if dtype in (torch.float32, torch.float64) and dtype.to_complex() in subject.supported(
        torch.complex64, torch.complex128
    ):
        kinds.append("negative")
    return kinds


# ---------------------------------------------------------------------- checking


def _values(move: Move, count: int) -> torch.Tensor:
    """Random bits; where an operation has to resolve them, ordinary numbers."""
    generator = torch.Generator().manual_seed(move.seed)
    if move.dtype is torch.bool:
        return torch.rand(count, generator=generator) > 0.5
    if move.kind in ("conjugate", "negative"):
        parts = torch.randn((count, 2), generator=generator, dtype=torch.float64)
        return torch.view_as_complex(parts)[:, None][:, 0].to(_complex(move.dtype))
    size = count * move.dtype.itemsize
    bits = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    return bits.view(move.dtype)


def _complex(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex else dtype.to_complex()


def check_move(subject: Subject, move: Move, note: Callable[[torch.Tensor], object]) -> None:
    """Do a move and hold it against all that the specification says of it.

    Args:
        subject: whose.
        move: which.
        note: is told each source and each result, to see later whether it is still alive.

    Raises:
        AssertionError: a paragraph is broken; its id stands first.
    """
    layout = LAYOUTS[move.layout](move.shape)
    assert layout is not None
    count, view = layout
    size = (count + 2 * _MARGIN) * move.dtype.itemsize
    places = [place for place in (move.source, move.target) if place is not None]
    if size > 1 << 20 and any(size * 8 > subject.room(place) for place in places):
        return
    with restored(subject):
        run_in(subject, move.situation, lambda: _check(subject, move, count, view, note))


def _check(
    subject: Subject,
    move: Move,
    count: int,
    view: Callable[[torch.Tensor], torch.Tensor],
    note: Callable[[torch.Tensor], object],
) -> None:
    values = _values(move, count + move.offset + _MARGIN)
    storage = _placed(subject, move, values)
    with torch.inference_mode(move.kind == "inference" or torch.is_inference_mode_enabled()):
        source = view(storage[move.offset : move.offset + count])
        expected = view(values[move.offset : move.offset + count]).clone()
        if move.kind == "conjugate":
            source, expected = source.conj(), expected.conj().resolve_conj()
        elif move.kind == "negative":
            source, expected = source.conj().imag, expected.conj().imag.resolve_neg()
    if move.kind == "requires_grad":
        source = source.detach().requires_grad_()
    elif move.kind == "parameter":
        source = nn.Parameter(source.detach())
    target = torch.device("cpu") if move.target is None else subject.device(move.target)
    if move.bare and target.type != "cpu":
        target = torch.device(target.type)
    flags, before = _flags(source), state(subject)
    try:
        moved = subject.backend.move(source, target, non_blocking=move.non_blocking)
    except Exception as error:
        raise AssertionError(f"MOV: the move raised {type(error).__name__}: {error}") from error
    changed = before.differences(state(subject))
    assert not changed, f"DEV-012: {changed}"
    assert _flags(source) == flags, f"MOV-009: the source was {flags}, and is {_flags(source)}"
    note(source)
    if move.source == move.target or subject.is_host:
        assert moved is source, "MOV-010: what is there already came back as another tensor"
        return
    note(moved)
    _assert_form(subject, move, source, moved)
    if move.target is None and move.non_blocking:
        subject.backend.synchronize(move.source or 0)
    assert same_bits(_read(moved), expected), f"MOV-001: the values changed {move.direction}"
    _assert_source_kept(subject, move, storage, values)
    _assert_apart(subject, move, source, moved, expected, target)
    if move.kind in ("requires_grad", "parameter") and torch.is_grad_enabled():
        _assert_gradient(subject, move, source, target)


def _placed(subject: Subject, move: Move, values: torch.Tensor) -> torch.Tensor:
    """The storage of the source, where it is to be; on a device as the result of queued work."""
    inference = move.kind == "inference"
    with torch.inference_mode(inference or torch.is_inference_mode_enabled()):
        if move.source is None:
            plain = values.clone()
            if not move.pinned:
                return plain
            pinned = torch.empty_like(plain, pin_memory=True, device="cpu")
            return pinned.copy_(plain)
        there = values.to(subject.device(move.source))
        return there.clone()


def _flags(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(tensor).__name__,
        tensor.device,
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.storage_offset(),
        f"requires_grad={tensor.requires_grad}",
        f"leaf={tensor.is_leaf}",
    )


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
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        assert moved.requires_grad == source.requires_grad, (
            f"MOV-011: requires_grad={source.requires_grad} became {moved.requires_grad}"
        )
    else:
        assert source.requires_grad or not moved.requires_grad, "MOV-011: a gradient is asked for"


def _read(tensor: torch.Tensor) -> torch.Tensor:
    """What a tensor holds, by torch's own blocking copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if plain.device.type == "cpu" else plain.cpu()


def _assert_source_kept(
    subject: Subject, move: Move, storage: torch.Tensor, values: torch.Tensor
) -> None:
    if move.source is None and move.non_blocking:
        return  # the copy may still read it; nothing says when it is done
    found = storage if storage.device.type == "cpu" else storage.cpu()
    assert same_bits(found, values), "MOV-009: the source, or its neighbour in memory, changed"


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
    assert same_bits(_read(again), expected), "MOV-008: two moves of one source share their memory"
    assert same_bits(_read(source), expected), "MOV-008: the result shares the source's memory"


def _assert_gradient(
    subject: Subject, move: Move, source: torch.Tensor, target: torch.device
) -> None:
    crosses = move.source is not None and move.target is not None
    if crosses and not subject.capabilities.streams:
        return  # torch orders a backward between devices by their events
    moved = subject.backend.move(source, target, non_blocking=move.non_blocking)
    (gradient,) = torch.autograd.grad(moved, source, torch.ones_like(moved), allow_unused=True)
    assert gradient is not None, "MOV-011: no gradient came back"
    assert gradient.device == source.device, f"MOV-011: the gradient is on {gradient.device}"
    assert same_bits(_read(gradient), torch.ones(move.shape, dtype=move.dtype)), (
        "MOV-011: a wrong gradient came back"
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory once, in whatever order of dimensions."""
    pairs = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    expected = 1
    for stride, size in pairs:
        if stride != expected:
            return False
        expected *= size
    return True
