"""DTY: casts from each dtype that is claimed to each other one; dtypes of results."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Final

import torch

from anydevice_conformance.ambients import default_dtype
from anydevice_conformance.data import same_bits, short_name
from anydevice_conformance.marks import slow
from anydevice_conformance.subject import Subject

#: Whole numbers; of them those that a dtype has.
_WHOLE: Final = (0, 1, -1, 2, 77, -77, 100, 127, -128, 200, 255, 1000, -1000, 70_000, -70_000)
_WIDE: Final = (2**24 + 1, -(2**24) - 1, 2**31 - 1, -(2**31), 2**31 + 9, 2**32 - 1, 2**40, -(2**40))
#: Fractions that every integer has room for, and what only floats have.
_FRACTIONS: Final = (0.0, 0.25, 0.5, 1.5, 2.5, 3.75, 63.9, 100.7)
_FLOATS: Final = (-0.0, -0.5, -2.5, 1e-7, 3e-5, 0.1, 447.0, 449.0, 65_504.0, 70_000.0, -1e9, 3e38)

#: What makes a floating result of whole numbers, of the default dtype.
_OF_WHOLE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "a quotient": lambda x: x / (x + 1),
    "a quotient by a number": lambda x: x / 2,
    "a product with a fraction": lambda x: x * 0.5,
    "a root": lambda x: x.sqrt(),
    "a function": lambda x: torch.sigmoid(x),
}
#: What no autocast has a dtype of its own for.
_OF_TWO: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "a sum": lambda x, y: x + y,
    "a difference": lambda x, y: x - y,
    "a product": lambda x, y: x * y,
    "a larger one": lambda x, y: torch.maximum(x, y),
    "a choice": lambda x, y: torch.where(x > 0, x, y),
    "a comparison": lambda x, y: x < y,
}


def test_DTY_015_pairs(subject: Subject, index: int) -> None:
    """Casts between any two claimed dtypes are the host's, also of what is broadcast or turned.

    Found: a value, or the place of one, is another than on the host.
    Fix: see the pair: signs of unsigned numbers, overflow to infinity, strides of both sides; or
    leave the dtype out of `supports_dtype`.
    """
    everything = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    claimed = sorted(filter(subject.backend.supports_dtype, everything), key=str)
    claimed = [d for d in claimed if not short_name(d).startswith(("q", "bits", "float4"))]
    for source in claimed:
        values = _values(source)
        there = subject.put(values, index)
        assert same_bits(subject.fetch(there), values), f"{source} is not held bit for bit"
        for target in claimed:
            if source.is_complex != target.is_complex:
                continue
            count = len(_shared(source, target))
            _assert_casts(values[:count], there[:count], target)


@slow
def test_DTY_007_default_dtype(subject: Subject, index: int) -> None:
    """What makes floats of integers makes them in the default dtype of the moment.

    Found: a quotient, or a function, of integers is of another dtype.
    Fix: ask torch for the default dtype at each call.
    """
    whole = subject.supported(torch.int64, torch.int32, torch.uint8)
    for default in subject.supported(torch.float32, torch.bfloat16, torch.float16, torch.float64):
        with default_dtype(default):
            for dtype in whole:
                host = torch.tensor([1, 0, 1]).to(dtype)
                _assert_dtypes(_OF_WHOLE, (host,), (subject.put(host, index),), f"by {default}")


def test_DTY_007_autocast(subject: Subject, index: int) -> None:
    """Under autocast, what it does not name has the dtype that `torch.result_type` says.

    Found: a sum, a comparison or the like has another dtype under autocast than without.
    Fix: register under autocast only what it is for: products, and what needs many digits.
    """
    floats = subject.supported(torch.float32, torch.bfloat16, torch.float16)
    for autocast in sorted(subject.backend.autocast_dtypes(), key=str):
        for one, other in itertools.product(floats, floats):
            hosts = torch.ones(3).to(one), torch.ones(3).to(other)
            theirs = [subject.put(host, index) for host in hosts]
            with torch.autocast(subject.type, dtype=autocast):
                found = {name: run(*theirs).dtype for name, run in _OF_TWO.items()}
            for name, run in _OF_TWO.items():
                wanted = run(*hosts).dtype
                assert found[name] is wanted, (
                    f"under autocast to {autocast} {name} of {one} and {other} is {found[name]}, "
                    f"not {wanted}"
                )


def _assert_dtypes(
    runs: dict[str, Callable[..., torch.Tensor]],
    hosts: tuple[torch.Tensor, ...],
    theirs: tuple[torch.Tensor, ...],
    words: str,
) -> None:
    for name, run in runs.items():
        wanted, found = run(*hosts), run(*theirs)
        assert found.dtype is wanted.dtype, (
            f"{name} of {hosts[0].dtype} {words} is {found.dtype}, not {wanted.dtype}"
        )
        assert torch.allclose(found.cpu().double(), wanted.double(), rtol=1e-2, equal_nan=True), (
            f"{name} of {hosts[0].dtype} {words} is {found.tolist()}, not {wanted.tolist()}"
        )


def _assert_casts(host: torch.Tensor, there: torch.Tensor, target: torch.dtype) -> None:
    with contextlib.suppress(NotImplementedError):  # of the host: torch itself lacks some
        into = torch.zeros(3, len(host)).to(target)
        wanted = {"cast": host.to(target), "copy": into.copy_(host).clone()}
        into = torch.zeros(3, len(host)).to(target).to(there.device)
        turned = torch.zeros(len(host), 3).to(target).to(there.device).t()
        found = {
            "cast": there.to(target),
            "copy": into.copy_(there),
            "turned copy": turned.copy_(there),
            "copy of what is expanded": into.clone().copy_(there.expand(3, -1)),
        }
        for name, one in found.items():
            expected = wanted.get(name, wanted["copy"])
            got = one.cpu().contiguous()
            assert got.dtype is target, f"a {name} to {target} gave {got.dtype}"
            became, not_ = (t.flatten().tolist()[: len(host)] for t in (got, expected))
            assert _same(got, expected), (
                f"a {name} of {host.dtype} to {target} on {there.device}: {host.tolist()} became "
                f"{became}, not {not_}"
            )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal, where any NaN equals any other."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    return torch.equal(
        one.double().nan_to_num(7.0, 1e309, -1e309), other.double().nan_to_num(7.0, 1e309, -1e309)
    )


def _values(dtype: torch.dtype) -> torch.Tensor:
    """What each dtype has, first; what only some have, behind."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.tensor([*_FRACTIONS, *_FLOATS], dtype=torch.float64).to(dtype)
    if dtype is torch.bool:
        return torch.tensor([True, False, True])
    limits = torch.iinfo(dtype)
    kept = [n for n in (*_WHOLE, *_WIDE) if limits.min <= n <= limits.max]
    return torch.tensor(kept, dtype=torch.int64).to(dtype)


def _shared(source: torch.dtype, target: torch.dtype) -> torch.Tensor:
    """Of a dtype's values, those whose cast is said: floats too large for an integer are not."""
    values = _values(source)
    whole = not (target.is_floating_point or target.is_complex)
    return values[: len(_FRACTIONS)] if source.is_floating_point and whole else values
