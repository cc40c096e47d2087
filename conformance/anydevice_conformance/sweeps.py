"""Plain moves of every dtype, layout and size, each way: thousands, at little cost.

The generated moves are tried in every situation, but each combination of a dtype, a layout and a
direction seldom comes among them. Here each one comes.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.data import DTYPES, same_bits, short_name
from anydevice_conformance.layouts import LAYOUTS, is_dense
from anydevice_conformance.moves import Move, make_source
from anydevice_conformance.moving import assert_gradient, read
from anydevice_conformance.situations import Situation, restored, run_in
from anydevice_conformance.subject import Subject

__all__ = ["routes", "sweep"]

Place = int | None  # a device's index; None is the host

#: Shape, layout, and how many elements lie before it in its storage.
_SMALL: Final[tuple[tuple[tuple[int, ...], str, int], ...]] = (
    ((), "contiguous", 5),
    ((1,), "contiguous", 0),
    ((0, 3), "contiguous", 0),
    ((7,), "contiguous", 3),
    ((65,), "contiguous", 0),
    ((4097,), "contiguous", 1),
    ((3, 5), "transposed", 0),
    ((33, 70), "transposed", 2),
    ((5, 8), "stepped", 1),
    ((9, 6), "narrowed", 0),
    ((4, 6), "expanded", 0),
    ((5, 6), "overlapping", 0),
    ((3, 4, 5), "transposed", 0),
    ((2, 3, 4, 5), "channels-last", 0),
    ((2, 3, 4, 5, 3), "channels-last", 1),
    ((2, 1, 3, 2, 1, 2), "contiguous", 2),
    ((2, 1, 2, 1, 2, 1, 3), "transposed", 0),
)
_LARGEST: Final = ((1 << 20) + 5,)
_LARGE: Final[tuple[tuple[tuple[int, ...], str, int], ...]] = (
    ((70_001,), "contiguous", 1),
    ((66_001, 2), "transposed", 0),  # more rows than a grid has blocks
    (_LARGEST, "contiguous", 3),
)
#: Of these dtypes the largest is tried: one of each number of bytes.
_LARGEST_OF: Final = (torch.float32, torch.bfloat16, torch.int64, torch.int8)
#: What torch has besides: a device that does not claim one may refuse it, and not change it.
_OTHERS: Final = (torch.uint16, torch.uint32, torch.uint64)
#: So many times the largest case is on a device at once.
_COPIES: Final = 7
#: So many tensors of each of these sizes are moved and kept.
_CROWD: Final = 24
_CROWDED: Final = (1, 1000, 4096)
#: So much more than its elements a result's storage may take, in bytes.
_SLACK: Final = 4096


def routes(subject: Subject, *, between: bool) -> list[tuple[Place, Place]]:
    """From where to where: between two devices both ways, or to each end and back."""
    if between:
        return list(subject.both_ways())
    return [route for index in subject.ends for route in ((None, index), (index, None))]


def sweep(subject: Subject, between: bool) -> None:
    """Do them all, and compare.

    Raises:
        AssertionError: one is wrong; the message says which.
    """
    for number, dtype in enumerate((*subject.supported(*DTYPES), *_OTHERS)):
        situation = Situation(
            subject.indices[-1],
            subject.indices[number % len(subject.indices)],
            side_stream=subject.capabilities.streams and number % 3 == 1,
            thread=bool(number % 2),
        )
        claimed = subject.backend.supports_dtype(dtype)
        for large, cases in ((False, _SMALL), (True, _LARGE)):
            if large and dtype.itemsize * _COPIES > min(map(subject.room, subject.indices)) >> 20:
                continue
            if large and subject.quick and dtype not in _LARGEST_OF:
                continue
            one = _Sweep(subject, number, dtype, large, cases, refusable=not claimed)
            refusal = contextlib.nullcontext() if claimed else contextlib.suppress(_RefusedError)
            with refusal, restored(subject):
                run_in(subject, situation, lambda one=one: one.run(between))  # type: ignore[misc]
    for source, target in routes(subject, between=between):
        _check_gradients(subject, source, target)
        _check_crowd(subject, source, target)


def _check_gradients(subject: Subject, source: Place, target: Place) -> None:
    """First and second derivatives, which go the other way; of results that go on, too."""
    crosses = source is not None and target is not None
    if subject.is_host or (crosses and not subject.capabilities.streams):
        return  # torch orders a backward between devices by their events
    dtypes = subject.supported(torch.float32, torch.float64)
    there = torch.device("cpu") if target is None else subject.device(target)
    for dtype, kind in itertools.product(dtypes, ("requires_grad", "parameter")):
        move = Move(
            dtype=dtype,
            shape=(5, 7),
            layout="contiguous",
            offset=0,
            source=source,
            target=target,
            non_blocking=False,
            pinned=False,
            kind=kind,
            situation=Situation(),
            seed=0,
        )
        leaf = make_source(subject, move).tensor
        words = f"MOV-011: of a {kind} of {short_name(dtype)}, "
        words += f"from {_name(source)} to {_name(target)}"
        try:
            assert_gradient(subject, move, leaf, there)
            moved = subject.backend.move(leaf * 2, there)
            (found,) = torch.autograd.grad(moved, leaf, torch.ones_like(moved))
        except Exception as error:
            raise AssertionError(f"{words}: {error}") from error
        assert read(found).eq(2).all(), f"{words}: the gradient of what is moved further is wrong"


def _check_crowd(subject: Subject, source: Place, target: Place) -> None:
    """Many results of one size that are all kept: each keeps its values while others come."""
    there = torch.device("cpu") if target is None else subject.device(target)
    for count in _CROWDED:
        plain = torch.arange(float(count))
        start = plain if source is None else plain.to(subject.device(source))
        found = [
            subject.backend.move(start + n, there, non_blocking=bool(n % 2)) for n in range(_CROWD)
        ]
        subject.synchronize_all()
        for number, moved in enumerate(found):
            assert torch.equal(read(moved), plain + number), (
                f"MOV-001: of {_CROWD} tensors of {count} float32, moved from {_name(source)} to "
                f"{_name(target)} and kept, the {number + 1}th has changed"
            )


class _RefusedError(Exception):
    """A dtype that the device does not claim is not taken."""


class _Sweep:
    """The moves of one dtype."""

    def __init__(
        self,
        subject: Subject,
        number: int,
        dtype: torch.dtype,
        large: bool,
        cases: tuple[tuple[tuple[int, ...], str, int], ...],
        refusable: bool,
    ) -> None:
        self._subject = subject
        self._number = number
        self._dtype = dtype
        self._large = large
        if large and dtype not in _LARGEST_OF:
            cases = cases[:-1]
        self._cases = cases
        self._refusable = refusable
        count = 9000 if not large else (1 << 20) + 9 if len(cases) == len(_LARGE) else 132_100
        bits = _bits(subject)[: count * dtype.itemsize].clone()
        self._values = (bits % 2).bool() if dtype is torch.bool else bits.view(dtype)
        self._storages: dict[tuple[Place, bool], torch.Tensor] = {}

    def run(self, between: bool) -> None:
        for route in routes(self._subject, between=between):
            done = [self._moved(route, *how) for how in self._each(route)]
            self._subject.synchronize_all()
            for check in done:
                check()
        for (place, _), storage in self._storages.items():
            assert same_bits(read(storage), self._values), (
                f"MOV-009: moving views of it changed {short_name(self._dtype)} on {_name(place)}"
            )

    def _each(self, route: tuple[Place, Place]) -> Iterator[tuple[Any, bool, bool, bool]]:
        """The case, whether it is non-blocking, pinned, and requires grad."""
        pins = (False, True) if route[0] is None and self._pins() else (False,)
        trained = self._dtype.is_floating_point and self._dtype.itemsize > 1
        for number, (case, late, pinned) in enumerate(
            itertools.product(self._cases, (False, True), pins)
        ):
            if self._large and pinned != (late and pins[-1]):
                continue  # what is large takes time: half of the combinations
            place = number // (2 * len(pins)) + self._number
            if self._subject.quick and (place + late + pinned) % 2:
                continue
            yield case, late, pinned, trained and (place + late) % 3 == 0

    def _pins(self) -> bool:
        return self._subject.capabilities.pinned_memory

    def _storage(self, place: Place, pinned: bool) -> torch.Tensor:
        key = place, pinned
        if key not in self._storages:
            try:
                if place is not None:
                    found = self._values.to(self._subject.device(place))
                elif pinned:
                    found = self._subject.backend.pin_memory(self._values)
                else:
                    found = self._values.clone()
            except Exception as error:
                raise (_RefusedError() if self._refusable else error) from error
            self._storages[key] = found
        return self._storages[key]

    def _moved(
        self, route: tuple[Place, Place], case: Any, late: bool, pinned: bool, trained: bool
    ) -> Callable[[], None]:
        """Do a move; returns what holds it against the right answer."""
        shape, layout, offset = case
        made = LAYOUTS[layout](shape)
        assert made is not None
        count, view = made
        source = view(self._storage(route[0], pinned)[offset : offset + count])
        expected = view(self._values[offset : offset + count])
        if trained:
            source = source.detach().requires_grad_()
        target = self._subject.device(route[1]) if route[1] is not None else torch.device("cpu")
        words = f"{short_name(self._dtype)} {shape}, {layout}, {offset} elements in, "
        words += f"from {_name(route[0])} to {_name(route[1])}"
        words += "".join(
            f", {word}"
            for word, is_so in (("non-blocking", late), ("pinned", pinned), ("with grad", trained))
            if is_so
        )
        try:
            moved = self._subject.backend.move(source, target, non_blocking=late)
        except Exception as error:
            if self._refusable:
                raise _RefusedError from error
            raise AssertionError(f"MOV: {words}: {type(error).__name__}: {error}") from error

        def check() -> None:
            _assert_right(self._subject, source, moved, expected, words)

        return check


def _bits(subject: Subject) -> torch.Tensor:
    """Random bytes, made once a subject: enough for the largest of 8 bytes, or small ones of 16."""
    found: torch.Tensor | None = subject.__dict__.get("_sweep_bits")
    if found is None:
        generator = torch.Generator().manual_seed(subject.seed + 11)
        size = 8 * ((1 << 20) + 9)
        found = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
        subject.__dict__["_sweep_bits"] = found
    return found


def _assert_right(
    subject: Subject,
    source: torch.Tensor,
    moved: torch.Tensor,
    expected: torch.Tensor,
    words: str,
) -> None:
    assert moved.dtype is source.dtype, f"MOV-001: became {moved.dtype}: {words}"
    assert moved.shape == source.shape, f"MOV-001: became {tuple(moved.shape)}: {words}"
    assert moved.requires_grad == source.requires_grad, (
        f"MOV-011: requires_grad became {moved.requires_grad}: {words}"
    )
    assert same_bits(read(moved), expected), f"MOV-001: the values changed: {words}"
    if not subject.strided or subject.is_host or not expected.numel():
        return
    assert moved.stride() == source.stride() or not is_dense(source), (
        f"MOV-007: strides {source.stride()} became {moved.stride()}: {words}"
    )
    taken = moved.untyped_storage().nbytes()
    assert taken <= expected.numel() * expected.itemsize + _SLACK, (
        f"MOV-008: the result takes {taken} bytes: {words}"
    )


def _name(place: Place) -> str:
    return "the host" if place is None else f"device {place}"
