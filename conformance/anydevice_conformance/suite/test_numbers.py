"""DTY: the operations that models need, each against the host in float64."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.data import same_bits
from anydevice_conformance.laws import hold_each
from anydevice_conformance.marks import slow
from anydevice_conformance.numbers import (
    Sample,
    check_gradients,
    check_sample,
    samples,
    smaller,
)
from anydevice_conformance.operations import OPERATIONS
from anydevice_conformance.outcomes import left_out, not_claimed
from anydevice_conformance.situations import MODES
from anydevice_conformance.subject import Subject


def _law(subject: Subject, kind: str, rounds: int) -> None:
    """Try each operation of a kind in each dtype; quickly, once."""
    names = [name for name, operation in OPERATIONS.items() if operation.kind == kind]
    tried = samples(subject, names, _rounds(subject, rounds))

    def law(sample: Sample) -> None:
        check_sample(subject, sample)

    hold_each(subject, tried, law, smaller)


def _rounds(subject: Subject, ordinary: int) -> int:
    """How often each operation is tried; ``--examples N`` gives about N of each law."""
    if subject.count:
        return max(1, subject.count // 40)
    return 1 if subject.quick else ordinary


def test_DTY_008_modes(subject: Subject, index: int) -> None:
    """The same numbers come with gradients on, off, and in inference mode.

    Found: an operation, or a write in place, gives something else in one of the modes.
    Fix: register kernels for the device's key, not for one of autograd's. A device that refuses
    inference mode altogether is let off; models then run under ``no_grad``.
    """
    values = torch.arange(12.0).reshape(3, 4)
    for name, mode in MODES.items():
        if name == "inference_mode" and not subject.infers:
            continue
        with mode():
            there = subject.put(values, index)
            changed = (there @ there.t()).add_(1)
            changed[0] = 5
            found = subject.fetch(changed)
        expected = values @ values.t() + 1
        expected[0] = 5
        assert torch.equal(found, expected), f"{name}: wrong numbers"
    if not subject.infers:
        not_claimed("the device does not work in inference mode: models run under no_grad on it")


def test_DTY_009_products(subject: Subject) -> None:
    """Matrix products, linear layers and convolutions are right, for every shape and dtype.

    Found: a product is wrong for some shape, layout, batch or dtype; the counterexample says which.
    Fix: check remainders of tiles, transposed and expanded operands, batches, and in what dtype the
    sum is kept.
    """
    _law(subject, "product", 5)


def test_DTY_010_attention(subject: Subject) -> None:
    """Attention is right: causal, masked, grouped, with any number of queries and keys.

    Found: the device's attention differs from softmax(q k / sqrt(d)) v, or is missing.
    Fix: check the mask's sign, rows with a single key left, the scale, and long rows; or leave the
    operation to torch's composite.
    """
    _law(subject, "attention", 5)


def test_DTY_011_normalisation(subject: Subject) -> None:
    """Norms, softmax and activations are right, also for large and small values.

    Found: a result is wrong, infinite or NaN where the host's is not.
    Fix: subtract the maximum before the exponential; keep sums in float32; use the epsilon given.
    """
    _law(subject, "normalisation", 5)


def test_DTY_012_reductions(subject: Subject) -> None:
    """Sums, means, products, extremes and cumulative sums are right; those of integers in 64 bits.

    Found: a sum of small integers overflowed, a dimension is wrong, or a half sum lost its digits.
    Fix: sum bools and integers as int64; keep a half sum in float32.
    """
    _law(subject, "reduction", 5)


def test_DTY_013_indexing(subject: Subject) -> None:
    """Indexing, gathering, sorting, argmax, comparisons and concatenation are the host's exactly.

    Found: another element, another index, or another dtype came.
    Fix: see negative indices, boolean masks, the dtype of indices, and strides.
    """
    _law(subject, "indexing", 5)


def test_DTY_014_half_sums(subject: Subject, index: int) -> None:
    """Long sums in 16 bits keep their digits.

    Found: a sum of many small numbers stood still, as it does when it is kept in 16 bits.
    Fix: accumulate in float32, and round once at the end.
    """
    for dtype in subject.supported(torch.float16, torch.bfloat16):
        for count in (4096, 20_000):
            row = torch.full((2, count), 1 / 64).to(dtype)
            there = subject.put(row, index)
            wanted = count / 64
            column = subject.put(torch.ones(count, 3).to(dtype), index)
            found = {
                "sum": there.sum(-1),
                "mean": there.mean(-1) * count,
                "sum of a column": there.t().contiguous().sum(0)[:, None],
                "matmul": there @ column,
                "linear": F.linear(there, column.t().contiguous()),
            }
            for name, result in found.items():
                got = subject.fetch(result).double()
                error = ((got - wanted).abs().max() / wanted).item()
                assert error < 0.02, f"{name} of {count} {dtype}: off by {error:.1%}"


def test_DTY_015_edge_casts(subject: Subject, index: int) -> None:
    """Casts at the edges are the host's: ties, overflow, infinities, NaN, halves of integers.

    Found: a value at an edge is cast otherwise.
    Fix: round to nearest, ties to even; overflow to infinity or NaN as torch does for the dtype;
    towards zero from floating to integer.
    """
    edges = [0.0, -0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.1, 1.0000001, 3.4e38, 1e-40, 6e-8, 2.9e-8]
    edges += [65504.0, 65519.0, 65520.0, 448.0, 463.9, 464.0, 57344.0, 61439.0, 61440.0]
    edges += [0.001953125, 0.0009765625, 0.0009765624, 7.6e-6, 1.5e-5, math.inf, -math.inf]
    source = torch.tensor(edges + [-e for e in edges], dtype=torch.float32)
    floats = [
        d
        for d in (
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.float8_e4m3fn,
            torch.float8_e5m2,
        )
        if subject.backend.supports_dtype(d)
    ]
    there = subject.put(source, index)
    for dtype in floats:
        found = subject.fetch(there.to(dtype))
        assert same_bits(found, source.to(dtype)), (
            f"float32 to {dtype}: {_first_difference(found, source.to(dtype), source)}"
        )
        nan = subject.fetch(subject.put(torch.tensor([math.nan]), index).to(dtype))
        assert nan.double().isnan().all(), f"NaN to {dtype} is {nan.double().item()}"
        wide = subject.put(source.to(dtype), index).to(torch.float32)
        assert torch.equal(
            subject.fetch(wide).nan_to_num(7.0), source.to(dtype).float().nan_to_num(7.0)
        ), f"{dtype} to float32 is wrong"
    wide = torch.tensor([2.0**40, -(2.0**40), 2.0**31, -(2.0**31) - 1024, 2.0**24 + 2])
    for dtype in subject.supported(torch.float64, torch.float32):
        found = subject.fetch(subject.put(wide.to(dtype), index).to(torch.int64))
        assert torch.equal(found, wide.to(dtype).long()), f"{dtype} to int64: {found.tolist()}"
    small = torch.tensor([0.0, 0.9, -0.9, 1.5, -1.5, 2.5, 100.7, -100.7, 126.99])
    for dtype in subject.supported(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool):
        found = subject.fetch(subject.put(small, index).to(dtype))
        assert torch.equal(found, small.to(dtype)), f"float32 to {dtype}: {found.tolist()}"
        back = subject.fetch(subject.put(small.to(dtype), index).to(torch.float32))
        assert torch.equal(back, small.to(dtype).float()), f"{dtype} to float32: {back.tolist()}"


def _first_difference(found: torch.Tensor, wanted: torch.Tensor, source: torch.Tensor) -> str:
    for one, two, value in zip(found.double(), wanted.double(), source, strict=True):
        if one.item() != two.item() and not (one.isnan() and two.isnan()):
            return f"{value.item()} is {one.item()}, and {two.item()} on the host"
    return "a sign or a NaN's bits"


def test_DTY_016_complex(subject: Subject, index: int) -> None:
    """Complex numbers multiply, conjugate, and have modulus, angle and parts as on the host.

    Found: a complex operation is wrong.
    Fix: leave complex64 out of `supports_dtype`, or add the kernel.
    """
    subject.need_dtype(torch.complex64)
    generator = torch.Generator().manual_seed(4)
    parts = torch.randn(2, 6, 5, 2, generator=generator)
    one, two = torch.view_as_complex(parts[0].clone()), torch.view_as_complex(parts[1].clone())
    here, there = subject.put(one, index), subject.put(two, index)
    pairs: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "product": (torch.mul, (one, two)),
        "sum": (torch.add, (one, two)),
        "conjugate product": (lambda a, b: a * b.conj(), (one, two)),
        "modulus": (lambda a, b: a.abs(), (one, two)),
        "real": (lambda a, b: a.real + 0, (one, two)),
        "imaginary": (lambda a, b: a.imag + 0, (one, two)),
        "rotation": (lambda a, b: torch.view_as_real(a * b), (one, two)),
    }
    for name, (function, arguments) in pairs.items():
        found = subject.fetch(function(here, there)).resolve_conj().resolve_neg()
        wanted = function(*arguments).resolve_conj().resolve_neg()
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), f"{name} is wrong"


@slow
def test_DTY_017_large(subject: Subject, index: int) -> None:
    """Operations on more than 2^24 elements reach every element.

    Found: elements beyond 2^24 or 2^16 blocks were left out, or counted in float32.
    Fix: count elements in 64 bits; launch enough blocks.
    """
    count = (1 << 24) + 33
    if subject.room(index) < count * 12:
        left_out(f"needs {count * 12 >> 20} MiB free on the device")
    there = torch.ones(count, device=subject.device(index))
    there[-1] = 3
    there[1 << 24] = 2
    assert subject.fetch(there.max()).item() == 3, "the last element is not seen"
    assert subject.fetch(there.argmax()).item() == count - 1, "argmax beyond 2^24 is wrong"
    total = subject.fetch(there.bool().sum()).item()
    assert total == count, f"{count} elements, and {total} were counted"
    doubled = there.mul_(2)
    assert subject.fetch(doubled[-2:]).tolist() == [2, 6], "the last elements were not computed"
    assert subject.fetch(doubled[(1 << 24) - 1 : (1 << 24) + 1]).tolist() == [2, 4]


@slow
def test_DTY_017_large_counts(subject: Subject, index: int) -> None:
    """More than 2^24 bools and bytes are counted to the last.

    Found: a count was kept in float32, which has no odd numbers above 2^24.
    Fix: sum integers as int64.
    """
    count = (1 << 24) + 33
    if subject.room(index) < count * 2:
        left_out(f"needs {count * 2 >> 20} MiB free on the device")
    for dtype in subject.supported(torch.bool, torch.uint8, torch.int8):
        there = torch.ones(count, dtype=dtype, device=subject.device(index))
        there[-1], there[1 << 24] = 0, 0
        found = {
            "the sum": there.sum(),
            "the sum of a row": there.view(1, -1).sum(1)[0],
            "the number that is not zero": there.count_nonzero(),
        }
        for name, result in found.items():
            got = subject.fetch(result).item()
            assert got == count - 2, f"{name} of {count} {dtype} is {got}, not {count - 2}"


def test_DTY_018_gradients(subject: Subject) -> None:
    """Gradients of products, attention, norms, losses and indexing are right.

    Found: an operation is right and its gradient is not: another value, shape or dtype, or none.
    Fix: check the backward kernel: sums over what was broadcast, indices that come again, strides.
    """
    names = [name for name, operation in OPERATIONS.items() if operation.differentiable]
    tried = [
        sample
        for sample in samples(subject, names, _rounds(subject, 3))
        if sample.dtype is torch.float32  # on some hosts half types have no backward
    ]

    def law(sample: Sample) -> None:
        check_gradients(subject, sample)

    hold_each(subject, tried, law, smaller)
