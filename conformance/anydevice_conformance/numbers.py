"""Generated operations: what models compute, on the device and on the host in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import torch
from hypothesis import strategies as st

from anydevice_conformance.data import short_name, tolerance
from anydevice_conformance.dice import Dice
from anydevice_conformance.operations import OPERATIONS, A, N
from anydevice_conformance.subject import Subject

__all__ = ["Sample", "check_sample", "samples"]

#: Exponentials, roots and similar functions: many devices have them in float32's digits only.
_FUNCTIONS: Final = 1e-5


@dataclasses.dataclass(frozen=True)
class Sample:
    """An operation with arguments.

    Attributes:
        name: of the operation.
        dtype: of its floating arguments.
        seed: of its arguments.
        index: of the device.
        strided: whether the floating arguments are transposed in memory.
    """

    name: str
    dtype: torch.dtype
    seed: int
    index: int
    strided: bool

    def arguments(self) -> list[torch.Tensor]:
        """The arguments, on the host."""
        found = []
        for tensor in OPERATIONS[self.name].make(Dice(self.seed)):
            cast = tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            if self.strided and cast.dim() >= 2 and cast.is_floating_point():
                cast = cast.mT.contiguous().mT
            found.append(cast)
        return found

    def __repr__(self) -> str:
        shapes = ", ".join(f"{short_name(a.dtype)} {tuple(a.shape)}" for a in self.arguments())
        layout = ", transposed in memory" if self.strided else ""
        return f"<{self.name} of {shapes}{layout}, on device {self.index}, arguments {self.seed}>"


def samples(subject: Subject, names: Sequence[str]) -> st.SearchStrategy[Sample]:
    """Samples of some operations, in the dtypes that are claimed."""
    dtypes = subject.supported(torch.float32, torch.bfloat16, torch.float16, torch.float64)

    def build(name: str, dtype: torch.dtype, seed: int, index: int, strided: bool) -> Sample:
        if OPERATIONS[name].exact:
            dtype = torch.float32
        return Sample(name, dtype, seed, index, strided)

    return st.builds(
        build,
        st.sampled_from(list(names)),
        st.sampled_from(dtypes),
        st.integers(0, 999),
        st.sampled_from(subject.indices),
        st.booleans(),
    )


def check_sample(subject: Subject, sample: Sample) -> None:
    """Compute on the device, and compare.

    Raises:
        AssertionError: it is wrong.
    """
    operation = OPERATIONS[sample.name]
    arguments = sample.arguments()
    there = [a.to(subject.device(sample.index)) for a in arguments]
    result = operation.run(*there)
    plain = operation.run(*arguments)
    assert result.dtype is plain.dtype, f"{sample.name} gave {result.dtype}, not {plain.dtype}"
    assert result.shape == plain.shape, f"{sample.name} gave {result.shape}, not {plain.shape}"
    assert subject.is_on(result, sample.index), f"{sample.name} gave a result on {result.device}"
    found = result.cpu()
    if operation.exact or not plain.is_floating_point():
        assert torch.equal(found, plain), f"{sample.name}: {_differences(found, plain)}"
        return
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    exact = operation.run(*wide).double()
    got = found.double()
    finite = exact.abs() < torch.finfo(plain.dtype).max
    assert torch.equal(got.isnan(), plain.double().isnan()), f"{sample.name}: NaN in other places"
    error = torch.where(finite, (got - exact).abs(), torch.zeros_like(exact)).nan_to_num(0.0)
    scale = torch.where(finite, exact.abs(), torch.zeros_like(exact)).nan_to_num(0.0)
    allowed = tolerance(plain.dtype) * operation.loose
    if operation.kind in (A, N):
        allowed = max(allowed, _FUNCTIONS)
    # In proportion to the largest of all, as errors of a product are; never below one in a million.
    most = max(float(scale.max()) if scale.numel() else 0.0, 1e-6)
    worst = float(error.max()) / most if error.numel() else 0.0
    assert worst <= allowed, f"{sample.name} is off by {worst:.2g}; {allowed:.2g} is allowed"


def _differences(found: torch.Tensor, wanted: torch.Tensor) -> str:
    places = (found != wanted).nonzero()[:3].tolist()
    return ", ".join(f"at {p}: {found[tuple(p)]} for {wanted[tuple(p)]}" for p in places)
