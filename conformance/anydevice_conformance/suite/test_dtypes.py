"""DTY: what can be held and computed."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.data import (
    DTYPES,
    REAL_FLOATS,
    same_bits,
    sample,
    short_name,
    specials,
    tolerance,
)
from anydevice_conformance.marks import by_dtype
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.subject import Subject

_INTEGERS = [d for d in DTYPES if not (d.is_floating_point or d.is_complex)]


def test_DTY_001_answers(subject: Subject) -> None:
    """`supports_dtype` returns a bool for every dtype.

    Found: it raised, returned something else, or changed its mind; float32 is not supported, or
    a dtype of quantised numbers or of bare bits is.
    Fix: ``return dtype in {...}``.
    """
    everything = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    for dtype in sorted(everything, key=str):
        answers = {subject.backend.supports_dtype(dtype) for _ in range(2)}
        assert len(answers) == 1, f"two answers for {dtype}"
        claimed = answers.pop()
        assert type(claimed) is bool, f"no bool for {dtype}"
        if short_name(dtype).startswith(("q", "bits")):
            assert not claimed, f"{dtype} is claimed, with which nothing computes"
    assert subject.backend.supports_dtype(torch.float32), "float32 is not supported"


@by_dtype(DTYPES)
def test_DTY_002_hold_and_cast(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """A tensor of each claimed dtype can be held, and cast to float32 there.

    Found: the dtype is claimed, and cannot be held or cast.
    Fix: leave it out of `supports_dtype`, or add the cast.
    """
    subject.need_dtype(dtype)
    _assert_holds_and_casts(subject, index, dtype)


@by_dtype(REAL_FLOATS)
def test_DTY_003_computes(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """`linear` in each claimed floating dtype agrees with the host, and has its dtype.

    Found: the result is wrong, of another dtype, or there is no kernel.
    Fix: leave the dtype out of `supports_dtype`, or add the kernel.
    """
    subject.need_dtype(dtype)
    _assert_computes(subject, index, dtype)


def test_DTY_004_unclaimed_does_not_work(
    subject: Subject, index: int, flag: Callable[[str, str], None]
) -> None:
    """A dtype that is not claimed does not work; one that does is flagged, not failed.

    Found: (a flag) the dtype works.
    Fix: add it to `supports_dtype`.
    """
    for dtype in DTYPES:
        if subject.backend.supports_dtype(dtype):
            continue
        try:
            _assert_holds_and_casts(subject, index, dtype)
            if dtype.is_floating_point:  # all that a claim would be held to
                _assert_bits_survive(subject, index, dtype)
                _assert_casts_round_alike(subject, index, dtype)
            if dtype in REAL_FLOATS:
                _assert_computes(subject, index, dtype)
        except Exception:  # noqa: BLE001 - as it said: it does not work
            continue
        flag(short_name(dtype), f"{dtype} is not claimed on device {index}, and works: claim it")


@by_dtype(_INTEGERS)
def test_DTY_005_integers(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """Integers and bools are added, compared, used as index and as mask as on the host.

    Found: an integer operation is wrong, or missing.
    Fix: leave the dtype out of `supports_dtype`, or add the kernel.
    """
    subject.need_dtype(dtype)
    one, other = sample(dtype, 50, seed=1), sample(dtype, 50, seed=2)
    here, there = subject.put(one, index), subject.put(other, index)
    assert torch.equal(subject.fetch(here == there), one == other), "comparison is wrong"
    assert torch.equal(subject.fetch(here | there), one | other), "bitwise or is wrong"
    if dtype is torch.bool:
        table = torch.arange(50.0)
        masked = subject.put(table, index).masked_fill(here, -1)
        assert torch.equal(subject.fetch(masked), table.masked_fill(one, -1)), "masking is wrong"
        return
    assert torch.equal(subject.fetch(here + there), one + other), "addition is wrong"
    if dtype is torch.int64:
        table, ids = torch.arange(30.0).reshape(10, 3), torch.tensor([9, 0, 5, 5])
        rows = F.embedding(subject.put(ids, index), subject.put(table, index))
        assert torch.equal(subject.fetch(rows), table[ids]), "indexing by int64 is wrong"


@by_dtype(DTYPES)
def test_DTY_006_casts_round_alike(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """float32 to each claimed smaller floating dtype rounds as on the host.

    Found: the device rounds otherwise (towards zero, say), or flushes small values.
    Fix: round to nearest, ties to even; keep denormals.
    """
    if not dtype.is_floating_point or dtype.itemsize >= 4:
        not_claimed(f"{dtype} is not smaller than float32")
    subject.need_dtype(dtype)
    _assert_casts_round_alike(subject, index, dtype)


def _assert_bits_survive(subject: Subject, index: int, dtype: torch.dtype) -> None:
    source = specials(dtype)
    assert same_bits(subject.fetch(subject.put(source, index)), source), f"{dtype} loses bits"


def _assert_casts_round_alike(subject: Subject, index: int, dtype: torch.dtype) -> None:
    source = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    source = torch.cat([source, source * 1e-3, torch.tensor([0.0, -0.0, 1.0, -1.5, 448.0])])
    found = subject.fetch(subject.put(source, index).to(dtype))
    assert found.dtype is dtype, f"a cast to {dtype} gave {found.dtype}"
    assert same_bits(found, source.to(dtype)), f"the device casts to {dtype} otherwise"


def test_DTY_007_result_dtypes(subject: Subject, index: int) -> None:
    """An operation on two dtypes has the dtype that `torch.result_type` says, and its precision.

    Found: a result of another dtype, or float64 computed as float32.
    Fix: follow torch's type promotion; do not claim what is computed in less.
    """
    claimed = [d for d in DTYPES if d.itemsize > 1 and subject.backend.supports_dtype(d)]
    for one in claimed:
        for other in claimed:
            x, y = torch.ones(3).to(one), torch.ones(3).to(other)
            expected = torch.result_type(x, y)
            if not subject.backend.supports_dtype(expected):
                continue
            found = subject.put(x, index) + subject.put(y, index)
            assert found.dtype is expected, f"{one} + {other} is {found.dtype}, not {expected}"
    if torch.float64 in claimed:
        fine = torch.tensor([1.0, 1 + 1e-12], dtype=torch.float64)
        there = subject.put(fine, index)
        difference = subject.fetch(there[1:] - there[:1]).item()
        assert abs(difference - 1e-12) < 1e-15, f"float64 is computed in less: {difference}"


def _assert_holds_and_casts(subject: Subject, index: int, dtype: torch.dtype) -> None:
    source = sample(dtype, 33, 3)
    there = subject.put(source, index)
    assert there.dtype is dtype, f"{dtype} is held as {there.dtype}"
    assert same_bits(subject.fetch(there), source), f"{dtype} is not held bit for bit"
    wide = torch.complex64 if dtype.is_complex else torch.float32
    cast = subject.fetch(there.to(wide))
    assert cast.dtype is wide, f"a cast of {dtype} to {wide} gave {cast.dtype}"
    assert torch.allclose(cast, source.to(wide), rtol=1e-6, atol=0, equal_nan=True), (
        f"a cast of {dtype} to {wide} is wrong"
    )


def _assert_computes(subject: Subject, index: int, dtype: torch.dtype) -> None:
    x, weight, bias = sample(dtype, 9, 32), sample(dtype, 17, 32, seed=1), sample(dtype, 17, seed=2)
    found = F.linear(*(subject.put(t, index) for t in (x, weight, bias)))
    assert found.dtype is dtype, f"linear in {dtype} gave {found.dtype}"
    exact = F.linear(x.double(), weight.double(), bias.double())
    scale, error = exact.abs().max(), (subject.fetch(found).double() - exact).abs().max()
    assert error <= tolerance(dtype) * scale, f"linear in {dtype} is off by {error / scale:.2g}"
