"""Generated operations: what models compute, on the device and on the host in float64."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from anydevice_conformance.data import short_name, tolerance
from anydevice_conformance.dice import Dice
from anydevice_conformance.operation import A, N, Operation
from anydevice_conformance.operations import OPERATIONS
from anydevice_conformance.refusals import is_refused_view
from anydevice_conformance.subject import Subject

__all__ = ["Sample", "check_gradients", "check_sample", "samples", "smaller"]

#: Exponentials, roots and similar functions: many devices have them in float32's digits only.
_FUNCTIONS: Final = 1e-5
#: Orders of the dimensions in memory, outermost first, by name; the first is contiguous.
_ORDERS: Final[dict[str, Callable[[int], list[int]]]] = {
    "contiguous": lambda dims: list(range(dims)),
    "transposed": lambda dims: [*range(dims - 2), dims - 1, dims - 2],
    "channels-last": lambda dims: [0, *range(2, dims), 1],
    "heads within rows": lambda dims: [0, 2, 1, *range(3, dims)],
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """An operation with arguments.

    Attributes:
        name: of the operation.
        dtype: of its floating arguments.
        seed: of its arguments.
        index: of the device.
        orders: of the first argument's dimensions in memory, of the second's, and so on in turn.
    """

    name: str
    dtype: torch.dtype
    seed: int
    index: int
    orders: tuple[str, ...]

    def arguments(self) -> list[torch.Tensor]:
        """The arguments, on the host."""
        made = OPERATIONS[self.name].make(Dice(self.seed))
        return [
            _ordered(tensor.to(self.dtype) if tensor.is_floating_point() else tensor, order)
            for tensor, order in zip(made, itertools.cycle(self.orders))
        ]

    def __repr__(self) -> str:
        shapes = ", ".join(f"{short_name(a.dtype)} {tuple(a.shape)}" for a in self.arguments())
        plain = set(self.orders) == {"contiguous"}
        orders = "" if plain else f", in memory {' and '.join(self.orders)}"
        return f"<{self.name} of {shapes}{orders}, on device {self.index}, arguments {self.seed}>"


def _ordered(tensor: torch.Tensor, order: str) -> torch.Tensor:
    """The tensor with its dimensions in that order in memory; transposed where it has few."""
    dims = tensor.dim()
    if dims < 2 or order == "contiguous":
        return tensor
    axes = _ORDERS[order if dims >= 4 else "transposed"](dims)
    return tensor.permute(axes).contiguous().permute([axes.index(axis) for axis in range(dims)])


def samples(subject: Subject, names: Sequence[str], rounds: int) -> list[Sample]:
    """Samples of some operations: so many times each of them in each dtype that is claimed.

    Those of one operation differ in how their arguments lie in memory: alike, in each order, and
    each argument in another one.
    """
    dtypes = subject.supported(torch.float32, torch.bfloat16, torch.float16, torch.float64)
    dice = random.Random(subject.seed)
    found = []
    for name in names:
        kinds = [torch.float32] * 2 if OPERATIONS[name].exact else dtypes
        first = dice.randrange(len(_ORDERS))
        for number, dtype in enumerate(kinds * rounds, first):
            orders = (list(_ORDERS) * 2)[number % len(_ORDERS) :][: dice.choice((1, len(_ORDERS)))]
            seed, index = dice.randrange(1000), dice.choice(subject.indices)
            found.append(Sample(name, dtype, seed, index, tuple(orders)))
    dice.shuffle(found)
    return found


def smaller(sample: Sample) -> Iterator[Sample]:
    """Other samples of the same operation, whose arguments are smaller; the smallest first."""
    others = [dataclasses.replace(sample, seed=seed, orders=("contiguous",)) for seed in range(40)]
    sizes = {other.seed: sum(a.numel() for a in other.arguments()) for other in others}
    size = sum(a.numel() for a in sample.arguments())
    yield from sorted(
        (o for o in others if sizes[o.seed] < size), key=lambda other: sizes[other.seed]
    )


def check_sample(subject: Subject, sample: Sample) -> None:
    """Compute on the device, and compare.

    Raises:
        AssertionError: it is wrong.
    """
    operation = OPERATIONS[sample.name]
    arguments = sample.arguments()
    there = [a.to(subject.device(sample.index)) for a in arguments]
    try:
        result = operation.run(*there)
    except RuntimeError as error:
        if operation.needed or not _is_missing(error):
            raise
        return
    plain = operation.run(*arguments)
    assert result.dtype is plain.dtype, f"{sample.name} gave {result.dtype}, not {plain.dtype}"
    assert result.shape == plain.shape, f"{sample.name} gave {result.shape}, not {plain.shape}"
    assert subject.is_on(result, sample.index), f"{sample.name} gave a result on {result.device}"
    found = result.cpu()
    if operation.exact or not plain.is_floating_point():
        assert torch.equal(found, plain), f"{sample.name}: {_differences(found, plain)}"
        return
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    assert torch.equal(found.isnan(), plain.isnan()), f"{sample.name}: NaN in other places"
    _assert_close(sample, sample.name, found, operation.run(*wide), operation.loose)


def check_gradients(subject: Subject, sample: Sample) -> None:
    """Compute the gradients of an operation on the device, and compare.

    Raises:
        AssertionError: one is wrong.
    """
    operation = OPERATIONS[sample.name]
    arguments = sample.arguments()
    try:
        found = _gradients(operation, [a.to(subject.device(sample.index)) for a in arguments])
    except RuntimeError as error:
        if operation.needed or not _is_missing(error):
            raise
        return
    wide = [a.double() if a.is_floating_point() else a for a in arguments]
    for number, (one, other) in enumerate(zip(found, _gradients(operation, wide), strict=True)):
        name = f"the gradient of {sample.name} for argument {number + 1}"
        assert (one is None) == (other is None), f"{name} is {'missing' if one is None else 'new'}"
        if one is None or other is None:
            continue
        assert one.shape == other.shape, f"{name} has the shape {tuple(one.shape)}"
        assert one.dtype is sample.dtype, f"{name} is {one.dtype}"
        # Where it is zero, as that of a norm of one element is, rounding is all that is left of it.
        _assert_close(sample, name, one.cpu(), other, 4 * operation.loose, least=0.05)


def _is_missing(error: RuntimeError) -> bool:
    return isinstance(error, NotImplementedError) or is_refused_view(error)


def _gradients(
    operation: Operation, arguments: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """Of a weighted sum of the results, for the floating arguments."""
    leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in arguments]
    result = operation.run(*leaves)
    weights = torch.linspace(-1.0, 1.5, max(1, result.numel()), dtype=torch.float64)
    weights = weights[: result.numel()].reshape(result.shape).to(result.dtype).to(result.device)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return list(torch.autograd.grad(result, wanted, weights, allow_unused=True))


def _assert_close(
    sample: Sample,
    name: str,
    found: torch.Tensor,
    wanted: torch.Tensor,
    loose: float,
    least: float = 1e-6,
) -> None:
    exact, got = wanted.double(), found.double()
    finite = exact.abs() < torch.finfo(found.dtype).max
    error = torch.where(finite, (got - exact).abs(), torch.zeros_like(exact)).nan_to_num(0.0)
    scale = torch.where(finite, exact.abs(), torch.zeros_like(exact)).nan_to_num(0.0)
    allowed = tolerance(found.dtype) * loose
    if OPERATIONS[sample.name].kind in (A, N):
        allowed = max(allowed, _FUNCTIONS)
    # In proportion to the largest of all, as errors of a product are; never below ``least``.
    most = max(float(scale.max()) if scale.numel() else 0.0, least)
    worst = float(error.max()) / most if error.numel() else 0.0
    assert worst <= allowed, f"{name} is off by {worst:.2g}; {allowed:.2g} is allowed"


def _differences(found: torch.Tensor, wanted: torch.Tensor) -> str:
    places = (found != wanted).nonzero()[:3].tolist()
    return ", ".join(f"at {p}: {found[tuple(p)]} for {wanted[tuple(p)]}" for p in places)
