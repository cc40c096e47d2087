"""MOV: values, bit for bit."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import psutil
import pytest
import torch

from anydevice_conformance.data import DTYPES, all_bits, same_bits, sample, specials
from anydevice_conformance.marks import by_dtype, slow
from anydevice_conformance.outcomes import left_out
from anydevice_conformance.subject import Subject

_FLOATS = [d for d in DTYPES if d.is_floating_point]
_INTEGERS = [d for d in DTYPES if not (d.is_floating_point or d.is_complex or d is torch.bool)]


@by_dtype(DTYPES)
def test_MOV_001_values_and_dtype(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """A tensor of each dtype arrives with its dtype and shape, and comes back equal.

    Found: a dtype was cast on the way, or values changed.
    Fix: move bytes, without a cast; where the device lacks the dtype, `supports_dtype` says False.
    """
    subject.need_dtype(dtype)
    source = all_bits(dtype, 3, 5, 7)
    there = subject.put(source, index)
    assert there.dtype is dtype, f"{dtype} arrived as {there.dtype}"
    assert there.shape == source.shape, f"shape {source.shape} arrived as {there.shape}"
    back = subject.fetch(there)
    assert back.dtype is dtype, f"{dtype} came back as {back.dtype}"
    assert same_bits(back, source), f"values changed: {_difference(back, source)}"


@by_dtype(_FLOATS)
def test_MOV_002_special_values(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """Zeros of both signs, infinities, denormals and NaN payloads come back bit for bit.

    Found: bits changed: a negative zero lost its sign, a NaN its payload, a denormal was flushed.
    Fix: copy bytes; do not let the values pass through arithmetic or another dtype.
    """
    subject.need_dtype(dtype)
    source = specials(dtype)
    for tensor in (source, source.repeat(50)[1:]):
        back = subject.fetch(subject.put(tensor, index))
        assert same_bits(back, tensor), f"bits changed: {_bit_difference(back, tensor)}"


@by_dtype(_INTEGERS)
def test_MOV_003_integer_extremes(subject: Subject, index: int, dtype: torch.dtype) -> None:
    """The least and greatest integers come back, and are right on the device.

    Found: values were truncated or rounded, for example int64 to int32.
    Fix: keep the width; where the device has no such integer, `supports_dtype` says False.
    """
    subject.need_dtype(dtype)
    width = torch.iinfo(dtype)
    values = [width.min, width.min + 1, 0, 1, width.max - 1, width.max]
    values += [v for v in (2**24 + 1, 2**31, 2**32 + 5, 2**53 + 1, -(2**31) - 1) if _fits(v, width)]
    source = torch.tensor(values, dtype=dtype)
    there = subject.put(source, index)
    back = subject.fetch(there)
    assert back.tolist() == values, f"{values} came back as {back.tolist()}"
    # By comparing all with all, which has no rounding of its own.
    found = subject.fetch(there[:, None] < there[None, :])
    expected = source[:, None] < source[None, :]
    assert torch.equal(found, expected), (
        f"on the device {values} are not what they are: their order is another"
    )


def test_MOV_005_device_computes_with_it(subject: Subject, index: int) -> None:
    """Operations on a moved tensor give what they give on the host.

    Found: the device computes with other values than were moved.
    Fix: see that the copy has the device's layout, and is done before kernels read it.
    """
    x, y = torch.arange(60.0).reshape(6, 10), torch.arange(6.0)
    there, other = subject.put(x, index), subject.put(y, index)
    pairs = {
        "x + x": (there + there, x + x),
        "x.t() + y": (there.t() + other, x.t() + y),
        "x.sum()": (there.sum(), x.sum()),
        "y @ x": (other @ there, y @ x),
        "x[2:4]": (there[2:4], x[2:4]),
    }
    for name, (found, expected) in pairs.items():
        assert subject.is_on(found, index), f"{name} is on {found.device}"
        assert torch.equal(subject.fetch(found), expected), f"{name} is wrong on the device"


@slow
@pytest.mark.parametrize("direction", ["to the device", "to the host"])
def test_MOV_020_above_4_gib(subject: Subject, direction: str) -> None:
    """A tensor of more than 2^32 bytes moves whole.

    Found: bytes beyond 4 GiB (or 2 GiB) were lost.
    Fix: count bytes in 64 bits, or copy in pieces.
    """
    if subject.is_host:
        left_out("the device is the host: nothing is moved")
    size, marks = (1 << 32) + 4096, (5, (1 << 31) + 5, (1 << 32) - 5, (1 << 32) + 5, -1)
    index = max(subject.indices, key=subject.room)
    room = subject.room(index)
    spare = psutil.virtual_memory().available
    if room < size * 1.05:
        left_out(f"needs {size >> 20} MiB free on the device; there are {room >> 20}")
    if spare < size * 2.5:
        left_out(
            f"needs {int(size * 2.5) >> 20} MiB available on the host; there are {spare >> 20}"
        )
    if direction == "to the device":
        source = torch.zeros(size, dtype=torch.uint8)  # pages of zeros cost no memory
        for number, place in enumerate(marks, start=1):
            source[place] = number
        there = subject.put(source, index)
        found = [int(subject.fetch(there[place].clone()).item()) for place in marks]
    else:
        there = torch.zeros(size, dtype=torch.uint8, device=subject.device(index))
        for number, place in enumerate(marks, start=1):
            there[place] = number
        back = subject.fetch(there)
        found = [int(back[place].item()) for place in marks]
    assert found == list(range(1, len(marks) + 1)), f"bytes at {marks} are {found}"


def test_MOV_021_odd_sizes(subject: Subject, index: int) -> None:
    """Lengths and offsets that are multiples of nothing move whole.

    Found: the last elements, or those of an unaligned view, are wrong.
    Fix: copy the remainder that vector kernels leave; check alignment before wide copies.
    """
    for dtype in subject.supported(torch.uint8, torch.float16, torch.float32):
        base = sample(dtype, 70_000)
        whole = subject.put(base, index)
        for length in (1, 3, 7, 31, 33, 127, 129, 1000, 4097, 65_537):
            for offset in (0, 1, 3):
                view = base[offset : offset + length]
                back = subject.fetch(subject.put(view, index))
                assert same_bits(back, view), f"{length} of {dtype} from {offset} changed"
                piece = subject.fetch(whole[offset : offset + length])
                assert same_bits(piece, view), f"{length} of {dtype} from {offset}: back changed"


def test_MOV_022_pending_signs(subject: Subject, index: int) -> None:
    """Lazily conjugated and negated tensors move as the values they stand for.

    Found: the pending conjugation or negation was lost or done twice.
    Fix: resolve it before copying bytes (``tensor.resolve_conj().resolve_neg()``).
    """
    subject.need_dtype(torch.complex64)
    source = sample(torch.complex64, 4, 3)
    conjugate, negative = source.conj(), source.conj().imag
    assert conjugate.is_conj()
    assert negative.is_neg()
    for tensor in (conjugate, negative):
        expected = tensor.resolve_conj().resolve_neg()
        back = subject.fetch(subject.put(tensor, index)).resolve_conj().resolve_neg()
        assert torch.equal(back, expected), "a pending sign was lost on the way"


def _fits(value: int, width: torch.iinfo) -> bool:
    return width.min <= value <= width.max


def _difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    places = (found != expected).nonzero()[:3].tolist()
    return ", ".join(f"at {p}: {found[tuple(p)]} for {expected[tuple(p)]}" for p in places)


def _bit_difference(found: torch.Tensor, expected: torch.Tensor) -> str:
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    one = found.contiguous().view(integer[found.dtype.itemsize])
    other = expected.contiguous().view(integer[expected.dtype.itemsize])
    places = (one != other).nonzero().flatten()[:3].tolist()
    return ", ".join(f"at {p}: {one[p].item():#x} for {other[p].item():#x}" for p in places)
