"""RNG: every way to draw."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Final

import torch
from hypothesis import strategies as st

from anydevice_conformance.laws import hold
from anydevice_conformance.marks import needs
from anydevice_conformance.situations import Situation, run_in
from anydevice_conformance.subject import Subject

pytestmark = needs("device_rng")


def test_RNG_006_parameters(subject: Subject, index: int) -> None:
    """Each way to draw obeys its parameters: bounds, mean, deviation, probability.

    Found: a bound that is left or never reached, a mean or a probability that is not obeyed, or a
    permutation that is none.
    Fix: pass the parameters on to the kernel; the upper bound of `randint` is left out.
    """
    subject.backend.manual_seed_all(12)
    device, count = subject.device(index), 20_000
    for name, (draw, low, high, mean, deviation) in _DISTRIBUTIONS.items():
        try:
            found = subject.fetch(draw(count, device)).double()
        except (NotImplementedError, RuntimeError):
            continue  # it need not have all
        assert low <= found.min() and found.max() <= high, (  # noqa: PT018
            f"{name} gave {found.min()} to {found.max()}"
        )
        error = abs(found.mean() - mean)
        assert error < 6 * deviation / math.sqrt(found.numel()), (
            f"{name}: the mean is {found.mean()}"
        )
        assert abs(found.std() / deviation - 1) < 0.06, f"{name}: the deviation is {found.std()}"
        if found.equal(found.round()) and high - low < 100:
            values = set(found.tolist())
            assert {low, high} <= values, f"{name} never gave {low} or {high}: {sorted(values)[:9]}"
    for size in (1, 50, 2500):
        found = subject.fetch(torch.randperm(size, device=device))
        assert found.sort().values.equal(torch.arange(size)), f"randperm({size}) is no permutation"
        assert size < 50 or not found.equal(torch.arange(size)), f"randperm({size}) is in order"


Draw = Callable[[int, torch.device], torch.Tensor]


def _kept(count: int, device: torch.device) -> torch.Tensor:
    return torch.nn.functional.dropout(torch.ones(count, device=device), 0.2, training=True) > 0


def _picked(count: int, device: torch.device) -> torch.Tensor:
    weights = torch.tensor([1.0, 0.0, 3.0]).to(device)
    return torch.multinomial(weights, count, replacement=True)


#: Name to a function, and least, greatest, mean and deviation of what it gives.
_DISTRIBUTIONS: dict[str, tuple[Draw, float, float, float, float]] = {
    "randint(3, 9)": (lambda n, d: torch.randint(3, 9, (n,), device=d), 3, 8, 5.5, 1.7078),
    "random_(2, 5)": (lambda n, d: torch.zeros(n, device=d).random_(2, 5), 2, 4, 3, 0.8165),
    "uniform_(2, 5)": (lambda n, d: torch.empty(n, device=d).uniform_(2, 5), 2, 5, 3.5, 0.866),
    "normal_(3, 2)": (lambda n, d: torch.empty(n, device=d).normal_(3, 2), -9, 15, 3, 2),
    "bernoulli_(0.3)": (lambda n, d: torch.empty(n, device=d).bernoulli_(0.3), 0, 1, 0.3, 0.4583),
    "bernoulli": (lambda n, d: torch.bernoulli(torch.full((n,), 0.3, device=d)), 0, 1, 0.3, 0.4583),
    "exponential_(2)": (lambda n, d: torch.empty(n, device=d).exponential_(2), 0, 15, 0.5, 0.5),
    "dropout(0.2)": (_kept, 0, 1, 0.8, 0.4),
    "multinomial": (_picked, 0, 2, 1.5, 0.866),
}


def _ways(subject: Subject, index: int) -> dict[str, Callable[[], torch.Tensor]]:
    device = subject.device(index)
    base = torch.ones(37, device=device)
    weights = torch.ones(5, device=device)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "rand of one": lambda: torch.rand(1, device=device),
        "rand of 1001": lambda: torch.rand(1001, device=device),
        "randn of 33": lambda: torch.randn(33, device=device),
        "randint": lambda: torch.randint(0, 1000, (40,), device=device),
        "randperm": lambda: torch.randperm(50, device=device),
        "rand_like": lambda: torch.rand_like(base),
        "normal_": lambda: base.clone().normal_(2.0, 3.0),
        "uniform_": lambda: base.clone().uniform_(-1, 1),
        "bernoulli_": lambda: base.clone().bernoulli_(0.5),
        "exponential_": lambda: base.clone().exponential_(),
        "dropout": lambda: torch.nn.functional.dropout(base, 0.5, training=True),
        "multinomial": lambda: torch.multinomial(weights, 40, replacement=True),
        "multinomial of each once": lambda: torch.multinomial(weights, 5),
        "bernoulli": lambda: torch.bernoulli(base / 2),
        "random_": lambda: base.clone().random_(0, 900),
        "normal": lambda: torch.normal(base, base),
        "rand of 20001": lambda: torch.rand(20_001, device=device),
        "randn of 20001": lambda: torch.randn(20_001, device=device),
        "randint of 20001": lambda: torch.randint(0, 1000, (20_001,), device=device),
        "randperm of 2500": lambda: torch.randperm(2500, device=device),
        "rand of 3 by 5 by 7": lambda: torch.rand(3, 5, 7, device=device),
        "dropout of 3 by 5 by 7": lambda: torch.nn.functional.dropout(
            torch.ones(3, 5, 7, device=device), 0.5, training=True
        ),
        "randn of a transposed tensor": lambda: torch.ones(9, 5, device=device).t().normal_(),
        "randn of one": lambda: torch.randn(1, device=device),
        "dropout of 20001": lambda: torch.nn.functional.dropout(
            torch.ones(20_001, device=device), 0.5, training=True
        ),
    }
    for dtype in subject.supported(torch.float64, torch.bfloat16, torch.float16):
        like = torch.ones(65, device=device, dtype=dtype)
        ways[f"rand in {dtype}"] = functools.partial(torch.rand_like, like)
        ways[f"randn in {dtype}"] = functools.partial(torch.randn_like, like)
        ways[f"dropout in {dtype}"] = functools.partial(
            torch.nn.functional.dropout, like, 0.5, training=True
        )
    return ways


#: Whose numbers are so many that two draws are never equal.
_LONG: Final = (
    "rand of 1001",
    "randn of 33",
    "rand of 20001",
    "randn of 20001",
    "randint of 20001",
    "randperm of 2500",
    "dropout of 20001",
)
#: Whose numbers are so few that no two are equal.
_DIFFERENT: Final = ("randn of 33", "rand of 3 by 5 by 7", "randn of a transposed tensor")
_OF_ONE = ("rand of one", "randn of one")


def test_RNG_007_every_way_to_draw(subject: Subject) -> None:
    """Every way to draw follows the seed and the state, in every order, on every device and stream.

    Found: an operation draws from another generator, or does not move the state as it should.
    Fix: have every random kernel use the device's default generator and advance its offset.
    """
    ways = {index: _ways(subject, index) for index in subject.indices}
    names = _working(ways[subject.indices[0]])
    dice = random.Random(subject.seed)
    streams = subject.capabilities.streams
    for index in subject.indices:
        for odd in (False, True):
            current = subject.indices[-1 - subject.indices.index(index)] if odd else index
            mode = "no_grad" if odd else "enable_grad"
            situation = Situation(index, current, odd and streams, mode=mode)
            dice.shuffle(names)
            program = [(name, index) for name in names]
            run_in(subject, situation, functools.partial(_follow, subject, ways, program, odd))
    draws = st.lists(
        st.tuples(st.sampled_from(names), st.sampled_from(subject.indices)), min_size=1, max_size=5
    )

    def law(program: list[tuple[str, int]]) -> None:
        _follow(subject, ways, program)

    hold(subject, draws, law, examples=60)


def _follow(
    subject: Subject,
    ways: dict[int, dict[str, Callable[[], torch.Tensor]]],
    program: list[tuple[str, int]],
    elsewhere: bool = False,
) -> None:
    backend = subject.backend
    here = ", on a side stream" if elsewhere and subject.capabilities.streams else ""

    def run() -> list[torch.Tensor]:
        return [ways[index][name]().cpu() for name, index in program]

    def assert_same(one: list[torch.Tensor], other: list[torch.Tensor], what: str) -> None:
        for (name, index), a, b in zip(program, one, other, strict=True):
            assert torch.equal(a, b), f"{name} on device {index}{here} does not follow the {what}"

    backend.manual_seed_all(77)
    first = run()
    states = {index: backend.rng_state(index) for index in subject.indices}
    copies = {index: state.clone() for index, state in states.items()}
    more = run()
    backend.manual_seed_all(77)
    assert_same(first, run(), "seed")
    for index, state in states.items():
        assert torch.equal(state, copies[index]), f"device {index}'s state changed in its holder"
        backend.set_rng_state(state, index)
        assert torch.equal(state, copies[index]), "set_rng_state changed the state it was given"
    assert_same(more, run(), "state")
    for (name, index), one, two in zip(program, first, more, strict=True):
        if name in _LONG:
            assert not torch.equal(one, two), f"{name} on device {index} repeats itself"
        if name in _DIFFERENT:
            numbers = one.flatten().tolist()
            assert len(set(numbers)) == len(numbers), f"{name} gave a number twice: {numbers}"
    for name, index in program:
        if name in _OF_ONE:
            drawn = {ways[index][name]().item() for _ in range(3)}
            assert len(drawn) > 1, f"{name} on device {index} does not move the state"


def _working(ways: dict[str, Callable[[], torch.Tensor]]) -> list[str]:
    """Those that the device has: it need not have all."""
    found = []
    for name, draw in ways.items():
        try:
            draw()
        except (NotImplementedError, RuntimeError):
            continue
        found.append(name)
    assert "rand of 1001" in found, "the device cannot draw numbers"
    return found
