"""Plain moves of every dtype, layout, size and kind, each way: thousands, at little cost.

The generated moves are tried in every situation, but each combination of a dtype, a layout and a
direction seldom comes among them. Here each one comes, each dtype in each of the situations that
hold all pairs of what a situation is made of.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import nn

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.crowds import check_all
from anydevice_conformance.data import DTYPES, same_bits, short_name
from anydevice_conformance.forms import check_forms
from anydevice_conformance.gradients import check_gradients
from anydevice_conformance.ladders import check_sizes, random_bytes
from anydevice_conformance.layouts import LAYOUTS, is_dense, overlaps
from anydevice_conformance.moves import KINDS, Place, Tagged, dtypes_of, place_name
from anydevice_conformance.moving import flags_of, read
from anydevice_conformance.situations import Situation, restored, run_in, state, surroundings
from anydevice_conformance.subject import Subject
from anydevice_conformance.sweep_cases import SMALL_STORAGE, Case, small_cases

__all__ = ["routes", "sweep"]

_LARGEST: Final = ((1 << 20) + 5,)
_LARGE: Final[tuple[Case, ...]] = (
    ((70_001,), "contiguous", 1),
    ((2, 3, 160, 170), "channels-last", 0),
    ((1000, 300), "narrowed", 0),
    ((66_001, 5), "transposed", 0),  # more rows than a grid has blocks
    (_LARGEST, "contiguous", 3),
)
#: Of these dtypes the largest is tried: one of each number of bytes.
_LARGEST_OF: Final = (torch.float32, torch.int8, torch.bfloat16, torch.int64)
#: What torch has besides: a device that does not claim one may refuse it, and not change it.
_OTHERS: Final = (torch.uint16, torch.uint32, torch.uint64)
_FNUZ: Final = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_SELDOM: Final = (*_FNUZ, torch.float8_e8m0fnu, torch.complex32)
#: So many times the largest case is on a device at once.
_COPIES: Final = 7
#: Where sources of some kinds lie.
_STORED: Final = {"inference": "inference", "conjugate": "numbers", "negative": "numbers"}
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
    ways = routes(subject, between=between)
    seldom = subject.supported(*_SELDOM) if subject.quick else _SELDOM
    for number, dtype in enumerate((*subject.supported(*DTYPES), *_OTHERS, *seldom)):
        for large in (False, True):
            if large and dtype.itemsize * _COPIES > min(map(subject.room, subject.indices)) >> 20:
                continue
            if large and subject.quick and dtype not in _LARGEST_OF[:2]:
                continue
            for turn in range(1 if subject.quick or large else 3):
                place = number + 7 * turn
                cases = _LARGE if large else small_cases(place, subject.seed)
                one = _Sweep(subject, place, dtype, large, cases)
                try:
                    one.run(ways)
                except _RefusedError:
                    break
    for turn, (source, target) in enumerate(ways, start=subject.seed):
        check_gradients(subject, source, target)
        check_all(subject, source, target)
        check_sizes(subject, source, target, turn)
        check_forms(subject, source, target, turn)


class _RefusedError(Exception):
    """A dtype that the device does not claim is not taken."""


#: A way from place to place, a case, whether it is non-blocking, and the storage and the kind.
Job = tuple[tuple[Place, Place], Case, bool, str, str]


class _Sweep:
    """The moves of one dtype."""

    def __init__(
        self,
        subject: Subject,
        number: int,
        dtype: torch.dtype,
        large: bool,
        cases: tuple[Case, ...],
    ) -> None:
        self._subject = subject
        self._number = number + subject.seed
        self._dtype = dtype
        self._large = large
        if large and dtype not in _LARGEST_OF:
            cases = cases[:-1]
        self._cases = cases
        self._refusable = not subject.backend.supports_dtype(dtype)
        count = (
            SMALL_STORAGE if not large else (1 << 20) + 9 if len(cases) == len(_LARGE) else 330_100
        )
        self._values = {"": self._random_bits(count)}
        self._kinds = ["plain"]
        if not large and not self._refusable:
            kinds = [kind for kind in KINDS if kind != "plain"]
            self._kinds += [kind for kind in kinds if dtype in dtypes_of(subject, kind)]
        if "conjugate" in self._kinds:  # numbers, whose signs may be changed
            parts = torch.randn(SMALL_STORAGE, dtype=torch.float64)
            self._values["numbers"] = torch.complex(parts, parts.flip(0)).to(dtype)
        elif "negative" in self._kinds:
            self._values["numbers"] = torch.randn(SMALL_STORAGE, dtype=dtype)
        self._storages: dict[tuple[Place, str], torch.Tensor] = {}

    def _random_bits(self, count: int) -> torch.Tensor:
        bits = random_bytes(self._subject, count * self._dtype.itemsize).clone()
        return (bits % 2).bool() if self._dtype is torch.bool else bits.view(self._dtype)

    def run(self, ways: list[tuple[Place, Place]]) -> None:
        """Do the moves, a share of them in each situation."""
        jobs = [job for way in ways for job in self._each(way)]
        sources = [self._source(job) for job in jobs]
        self._subject.synchronize_all()
        every = covering_situations(self._subject)
        kept: list[torch.Tensor] = []
        for number, situation in enumerate(every):
            share = range((number + self._number) % len(every), len(jobs), len(every))
            if share:
                kept += self._run_in(situation, [(jobs[n], *sources[n]) for n in share])
        self._assert_apart(kept)
        for (place, how), storage in self._storages.items():
            values = self._values.get(how, self._values[""])
            assert same_bits(read(storage), values), (
                f"MOV-009: moving views of it changed {short_name(self._dtype)} on "
                f"{place_name(place)}"
            )

    def _run_in(
        self, situation: Situation, share: list[tuple[Job, torch.Tensor, torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Do a share of the moves, and compare; returns the results, where they are kept."""

        def work() -> list[tuple[torch.Tensor, Callable[[], None]]]:
            before = state(self._subject)
            done = [self._moved(*one, situation=situation) for one in share]
            changed = before.differences(state(self._subject))
            assert not changed, f"DEV-012: {len(share)} moves: {changed}; {situation!r}"
            return done

        with restored(self._subject):
            done = run_in(self._subject, situation, work)
        self._subject.synchronize_all()
        for _, check in done:
            check()
        return [moved for moved, _ in done] if not self._large else []

    def _assert_apart(self, kept: list[torch.Tensor]) -> None:
        """No two results that live at once are one memory, of equal values neither."""
        at = [(t.device, t.data_ptr()) for t in kept if t.numel() and not self._subject.is_host]
        places = [place for place in at if place[1]]  # some devices have no addresses
        assert len(places) == len(set(places)), (
            f"MOV-025: of {len(places)} results of {short_name(self._dtype)} two share their memory"
        )

    def _each(self, way: tuple[Place, Place]) -> Iterator[Job]:
        pins = way[0] is None and self._subject.capabilities.pinned_memory
        number = self._number
        for case, late, pinned in itertools.product(
            self._cases, (False, True), ("", "pinned") if pins else ("",)
        ):
            if self._large and pins and (late == bool(pinned)) == (self._cases.index(case) % 2):
                continue  # what is large takes time: half of the combinations
            number += 1
            if self._subject.quick and not self._large:
                place = self._cases.index(case) + self._number
                if (place + late + bool(pinned)) % 2:
                    continue
            kind = self._kinds[number * 5 // 4 % len(self._kinds)] if number % 3 else "plain"
            how = _STORED.get(kind, pinned)
            yield way, case, late, how, kind

    def _storage(self, place: Place, how: str) -> torch.Tensor:
        key = place, how
        if key not in self._storages:
            values = self._values.get(how, self._values[""])
            try:
                with torch.inference_mode(how == "inference"):
                    if place is not None:
                        found = values.to(self._subject.device(place))
                    elif how == "pinned":
                        found = self._subject.backend.pin_memory(values)
                    else:
                        found = values.clone()
            except Exception as error:
                raise (_RefusedError() if self._refusable else error) from error
            self._storages[key] = found
        return self._storages[key]

    def _source(self, job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        """What is moved, and what shall arrive."""
        way, (shape, layout, offset), _, how, kind = job
        made = LAYOUTS[layout](shape)
        assert made is not None
        count, view = made
        source = view(self._storage(way[0], how)[offset : offset + count])
        expected = view(self._values.get(how, self._values[""])[offset : offset + count])
        if kind == "plain" and how == "" and is_dense(source):
            source = source.clone()  # all of its storage, and no view
        elif kind == "requires_grad":
            source = source.detach().requires_grad_()
        elif kind == "parameter":
            source = nn.Parameter(source.detach())
        elif kind == "subclass":
            source = source.as_subclass(Tagged)
        elif kind == "conjugate":
            source, expected = source.conj(), expected.conj()
        elif kind == "negative":
            source, expected = torch._neg_view(source), -expected
        return source, expected

    def _moved(
        self, job: Job, source: torch.Tensor, expected: torch.Tensor, situation: Situation
    ) -> tuple[torch.Tensor, Callable[[], None]]:
        """Do a move; returns the result, and what holds it against the right answer."""
        (here, there), (shape, layout, offset), late, how, kind = job
        subject = self._subject
        target = subject.device(there) if there is not None else torch.device("cpu")
        words = f"{short_name(self._dtype)} {shape}, {layout}, {offset} elements in, "
        words += f"from {place_name(here)} to {place_name(there)}"
        words += ", non-blocking" * late + f", {how}" * (how == "pinned")
        words += f", {kind}" * (kind != "plain") + f"; {str(situation)[1:-1]}"
        flags = flags_of(source)
        try:
            with surroundings(subject):
                moved = subject.backend.move(source, target, non_blocking=late)
        except Exception as error:
            if self._refusable:
                raise _RefusedError from error
            raise AssertionError(f"MOV: {words}: {type(error).__name__}: {error}") from error
        assert flags_of(source) == flags, f"MOV-009: the source changed its form: {words}"
        infers = torch.is_inference_mode_enabled()
        graded = torch.is_grad_enabled() and not infers

        def check() -> None:
            assert moved.is_inference() == infers or moved is source, (
                f"MOV-024: is_inference() is not {infers}: {words}"
            )
            assert moved.device.type == target.type, f"MOV-004: is on {moved.device}: {words}"
            assert there is None or subject.is_on(moved, there), (
                f"MOV-004: is on {moved.device}: {words}"
            )
            assert moved.requires_grad == source.requires_grad or not graded, (
                f"MOV-011: requires_grad became {moved.requires_grad}: {words}"
            )
            _assert_right(subject, source, moved, expected, words)

        if there is not None and len(words) % 2:  # at once, with no other call of the backend
            check()
        return moved, check


def _assert_right(
    subject: Subject,
    source: torch.Tensor,
    moved: torch.Tensor,
    expected: torch.Tensor,
    words: str,
) -> None:
    assert moved.dtype is source.dtype, f"MOV-001: became {moved.dtype}: {words}"
    assert moved.shape == source.shape, f"MOV-001: became {tuple(moved.shape)}: {words}"
    assert same_bits(read(moved), expected), f"MOV-001: the values changed: {words}"
    if not subject.strided or subject.is_host or not expected.numel():
        return
    assert moved.stride() == source.stride() or not is_dense(source), (
        f"MOV-007: strides {source.stride()} became {moved.stride()}: {words}"
    )
    assert not overlaps(moved), f"MOV-025: elements of the result share their memory: {words}"
    taken = moved.untyped_storage().nbytes()
    assert taken <= expected.numel() * expected.itemsize + _SLACK, (
        f"MOV-008: the result takes {taken} bytes: {words}"
    )
