"""Generated moves: what is moved, how it lies in memory, where to, and in what situation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import torch
from hypothesis import strategies as st
from torch import nn

from anydevice_conformance.data import DTYPES, same_bits, short_name
from anydevice_conformance.layouts import LAYOUTS
from anydevice_conformance.situations import Situation, situations
from anydevice_conformance.subject import Subject

__all__ = [
    "KINDS",
    "Move",
    "Place",
    "Source",
    "Tagged",
    "dtypes_of",
    "make_source",
    "moves",
    "place_name",
]

Place = int | None  # a device's index; None is the host

_HUGE: Final = ((1_048_583,), (1024, 1029), (3, 5, 70_001))
_MIDDLING: Final = ((4095,), (4096,), (4097,), (64, 64), (65_537,), (3, 11, 1000), (2, 3, 31, 33))
_EMPTY: Final = ((0,), (3, 0, 2), (2, 1, 0, 3))
#: How many elements lie behind a source in its storage, where it is not all of it.
_MARGIN: Final = 19


def place_name(place: Place) -> str:
    """In words."""
    return "the host" if place is None else f"device {place}"


class Tagged(torch.Tensor):
    """A tensor of a class of its user's, as buffers and quantised weights are."""


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
        kind: ``plain``, ``subclass``, ``requires_grad``, ``parameter``, ``inference``,
            ``conjugate`` or ``negative``.
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
    def bytes(self) -> int:
        """How much memory its storage takes, about."""
        layout = LAYOUTS[self.layout](self.shape)
        assert layout is not None
        return (layout[0] + 2 * _MARGIN) * self.dtype.itemsize

    @property
    def direction(self) -> str:
        """In words."""
        return f"from {place_name(self.source)} to {place_name(self.target)}"

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


def moves(
    subject: Subject, *, between: bool = False, pinning: bool = False
) -> st.SearchStrategy[Move]:
    """Moves to the device, back, on the device itself; or all of them ``between`` two devices.

    With ``pinning`` all are to the device, of sources that are not pinned yet.
    """
    # Made once: drawing is most of what an example costs.
    kinds = {kind: dtypes_of(subject, kind) for kind in KINDS}
    kinds = {kind: dtypes for kind, dtypes in kinds.items() if dtypes}
    layouts = list(LAYOUTS)
    pins = subject.capabilities.pinned_memory and not pinning
    routes: list[tuple[Place, Place]]
    if between:
        routes = [(a, b) for a in subject.indices for b in subject.indices if a != b]
    else:
        routes = [(None, 0)] if pinning else [(None, 0), (0, None), (None, 0), (0, 0)]

    def build(
        kind: str,
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
            kinds[kind][dice // 20 % len(kinds[kind])],
            shape,
            layout,
            (0, 0, 1, 3, 16)[dice // 4 % 5],
            source,
            target,
            bool(dice & 1),
            pins and source is None and bool(dice & 2),
            kind,
            dataclasses.replace(situation, index=source if source is not None else target or 0),
            dice // 400,
            bare=target == 0 and dice // 400 % 3 == 1,
        )

    return st.builds(
        build,
        st.sampled_from(["plain"] * 5 + [kind for kind in kinds if kind != "plain"]),
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


#: Kinds of tensors, each with what dtypes can have it.
KINDS: Final[dict[str, Callable[[torch.dtype], bool]]] = {
    "plain": lambda dtype: True,
    "subclass": lambda dtype: True,
    "inference": lambda dtype: True,
    "requires_grad": lambda d: (d.is_floating_point and d.itemsize > 1) or d.is_complex,
    "parameter": lambda d: d.is_floating_point and d.itemsize > 1,
    "conjugate": lambda d: d.is_complex,
    "negative": lambda d: d in (torch.float32, torch.float64),
}


def dtypes_of(subject: Subject, kind: str) -> list[torch.dtype]:
    """The dtypes that a tensor of a kind can have on the device; none where there is no such."""
    if kind == "inference" and not subject.infers:
        return []
    dtypes = [d for d in subject.supported(*DTYPES) if KINDS[kind](d)]
    if kind == "negative":  # it is the imaginary part of a conjugate
        return [d for d in dtypes if subject.supported(d.to_complex())]
    return dtypes


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


@dataclasses.dataclass
class Source:
    """What is moved, in its storage.

    Attributes:
        tensor: the source itself.
        expected: the same values, on the host and in memory of their own.
        storage: all of the memory that it is a view of.
        values: what is in ``storage``, on the host.
    """

    tensor: torch.Tensor
    expected: torch.Tensor
    storage: torch.Tensor
    values: torch.Tensor

    def assert_kept(self) -> None:
        """Whether neither it nor its neighbours in memory have changed.

        Raises:
            AssertionError: they have.
        """
        found = self.storage if self.storage.device.type == "cpu" else self.storage.cpu()
        assert same_bits(found, self.values), (
            "MOV-009: the source, or its neighbour in memory, changed"
        )


def make_source(subject: Subject, move: Move) -> Source:
    """The source of a move, where it is to be; on a device as the result of queued work."""
    layout = LAYOUTS[move.layout](move.shape)
    assert layout is not None
    count, view = layout
    values = _values(move, count + move.offset + (_MARGIN if move.seed % 3 else 0))
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
    elif move.kind == "subclass":
        source = source.as_subclass(Tagged)
    return Source(source, expected, storage, values)


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
