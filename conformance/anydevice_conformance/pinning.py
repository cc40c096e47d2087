"""Pinning of every dtype in every layout, and of sizes up to some MiB, in every situation."""

from __future__ import annotations

import random
from typing import Final

import torch

from anydevice_conformance.covering import covering_situations
from anydevice_conformance.data import DTYPES, all_bits, same_bits, short_name
from anydevice_conformance.layouts import LAYOUTS, is_dense
from anydevice_conformance.situations import Situation, restored, run_in, state, surroundings
from anydevice_conformance.subject import Subject
from anydevice_conformance.sweep_cases import small_cases

__all__ = ["check_pins"]

#: Bytes of large sources; they take turns.
_LARGE: Final = (1 << 20, (1 << 21) + 1, (1 << 22) - 1, 70_001, 3 << 19)
#: Elements that lie in one memory with a small source.
_BESIDE: Final = 9001
#: So much more than its elements the result's storage may take, in bytes.
_SLACK: Final = 4096

#: A source, and what it is in words.
Source = tuple[torch.Tensor, str]


def check_pins(subject: Subject) -> None:
    """Pin them all, each in one of the situations; all results are kept, and compared at last.

    Raises:
        AssertionError: one is wrong; the message says which.
    """
    every = covering_situations(subject)
    sources = _sources(subject)
    kept: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    for number, situation in enumerate(every):
        large = all_bits(torch.uint8, _LARGE[(number + subject.seed) % len(_LARGE)], seed=number)
        if number % 2:  # a part of something larger
            large = torch.cat([large, large])[large.numel() // 3 :][: large.numel()]
        share = [*sources[number :: len(every)], (large, f"{large.numel()} uint8")]
        with restored(subject):
            pinned = run_in(subject, situation, lambda: _pinned(subject, situation, share))  # noqa: B023
        for (source, words), found in zip(share, pinned, strict=True):
            _assert_right(source, found, f"{words}; {situation!r}")
            _assert_apart(source, found, f"{words}; {situation!r}")
            if source is not large:
                kept.append((source, found, words))
    for source, found, words in kept:
        assert same_bits(found, source), f"PIN-002: of {words}, the values changed later"


def _sources(subject: Subject) -> list[Source]:
    """Every dtype in every layout, each a view of a storage of its own, mixed."""
    found: list[Source] = []
    for number, dtype in enumerate(subject.supported(*DTYPES)):
        for shape, layout, offset in small_cases(number, subject.seed + 1):
            made = LAYOUTS[layout](shape)
            assert made is not None
            count, view = made
            more = _BESIDE * (len(found) % 4 == 2)  # a small part of a large storage
            storage = all_bits(dtype, count + offset + more, seed=len(found))
            words = f"{short_name(dtype)} {shape}, {layout}, {offset} elements in"
            if len(found) % 3 == 1:
                storage, words = subject.backend.pin_memory(storage), f"pinned {words}"
            found.append((view(storage[offset : offset + count]), words))
    random.Random(subject.seed).shuffle(found)
    return found


def _pinned(subject: Subject, situation: Situation, share: list[Source]) -> list[torch.Tensor]:
    before, found = state(subject), []
    for source, words in share:
        was = source.data_ptr(), source.is_pinned()
        try:
            with surroundings(subject):
                found.append(subject.backend.pin_memory(source))
        except Exception as error:
            text = f"PIN-005: {words}; {situation!r}: {type(error).__name__}: {error}"
            raise AssertionError(text) from error
        assert (source.data_ptr(), source.is_pinned()) == was, (
            f"PIN-002: the original lies elsewhere, or is pinned itself: {words}; {situation!r}"
        )
    changed = before.differences(state(subject))
    assert not changed, f"DEV-012: {len(share)} pinned: {changed}; {situation!r}"
    return found


def _assert_apart(source: torch.Tensor, found: torch.Tensor, words: str) -> None:
    """What is written to the one does not show in the other; the bits come back afterwards."""
    if not source.numel() or (source.is_pinned() and found.data_ptr() == source.data_ptr()):
        return
    for one, other, name in ((source, found, "original"), (found, source, "pinned tensor")):
        bits = one.untyped_storage()
        place = one.storage_offset() * one.itemsize
        before, was = bits[place], other.untyped_storage()[other.storage_offset() * one.itemsize]
        bits[place] = before ^ 255
        now = other.untyped_storage()[other.storage_offset() * one.itemsize]
        bits[place] = before
        assert now == was, f"PIN-002: what is written to the {name} shows in the other: {words}"


def _assert_right(source: torch.Tensor, found: torch.Tensor, words: str) -> None:
    assert found.device.type == "cpu", f"PIN-001: is on {found.device}: {words}"
    assert same_bits(found, source), f"PIN-005: the values changed: {words}"
    if not source.numel():
        return
    assert found.is_pinned(), f"PIN-001: is not pinned: {words}"
    if source.is_pinned():  # it may be the source itself
        return
    assert found.stride() == source.stride() or not is_dense(source), (
        f"PIN-005: strides {source.stride()} became {found.stride()}: {words}"
    )
    taken = found.untyped_storage().nbytes()
    extent = sum((n - 1) * s for n, s in zip(source.shape, source.stride(), strict=True)) + 1
    extent = max(extent, source.numel()) * source.itemsize
    assert taken <= extent + _SLACK, f"PIN-005: the result takes {taken} bytes: {words}"
