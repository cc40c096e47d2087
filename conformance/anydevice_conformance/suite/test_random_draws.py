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

from anydevice_conformance.draws import Way, ways, working
from anydevice_conformance.laws import hold
from anydevice_conformance.marks import needs, two_devices
from anydevice_conformance.outcomes import not_claimed
from anydevice_conformance.situations import Situation, run_in, situations
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
            assert name != "multinomial" or 1 not in values, "multinomial gave what has no weight"
            assert {low, high} <= values, f"{name} never gave {low} or {high}: {sorted(values)[:9]}"
    for size in (1, 50, 2500, 70_001, 131_075):
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
    "randint(0, 2**40)": (
        lambda n, d: torch.randint(0, 1 << 40, (n,), device=d),
        *(0, (1 << 40) - 1, 2.0**39, 2.0**40 / math.sqrt(12)),
    ),
    "poisson(9)": (lambda n, d: torch.poisson(torch.full((n,), 9.0, device=d)), 0, 150, 9, 3),
}
#: So many numbers are drawn in one situation of each device only.
_HUGE: Final = 50_000


def test_RNG_007_every_way_to_draw(subject: Subject) -> None:
    """Every way to draw follows seed and state: in every order, on every device, stream and thread.

    Found: an operation draws from another generator, or does not move the state as it should.
    Fix: have every random kernel use the device's default generator and advance its offset.
    """
    found = working(ways(subject), subject.device(subject.indices[0]))
    dice = random.Random(subject.seed)
    streams = subject.capabilities.streams
    for index in subject.indices:
        other = subject.indices[-1 - subject.indices.index(index)]
        modes = ("no_grad", "inference_mode" if subject.infers else "no_grad")
        for number, situation in enumerate(
            (
                Situation(index, index),
                Situation(index, other, streams, mode=modes[0]),
                Situation(index, other, dice.random() < 0.5 and streams, True, modes[1]),
            )
        ):
            program = [(w, index) for w in found if w.count < _HUGE or number == index % 3]
            dice.shuffle(program)
            run_in(subject, situation, functools.partial(_follow, subject, program, situation))
    draws = st.lists(
        st.tuples(
            st.sampled_from([w for w in found if w.count < _HUGE]),
            st.sampled_from(subject.indices),
        ),
        min_size=1,
        max_size=5,
    )

    def law(example: tuple[list[tuple[Way, int]], Situation]) -> None:
        program, situation = example
        run_in(subject, situation, functools.partial(_follow, subject, program, situation))

    hold(subject, st.tuples(draws, situations(subject)), law, examples=60)


def test_RNG_007_own_generators(subject: Subject, index: int) -> None:
    """Every way to draw from a generator of the caller's follows that one, and no other.

    Found: the generator that was given is not used, or the default one is moved.
    Fix: hand ``generator=`` on to the kernel, on each device.
    """
    device, backend = subject.device(index), subject.backend
    try:
        generator = torch.Generator(device)
    except (NotImplementedError, RuntimeError):
        not_claimed("the device has no torch.Generator")
    found = [w for w in working(ways(subject), device) if w.seeded and w.count < _HUGE]
    before = backend.rng_state(index)
    for way in found:
        try:
            generator.manual_seed(31)
            first = way.draw(device, generator=generator).cpu()
        except (NotImplementedError, RuntimeError):
            continue  # it has this way for the default generator only
        state = generator.get_state()
        more = way.draw(device, generator=generator).cpu()
        _assert_alike(way.draw(device, generator=generator.manual_seed(31)), first, way, "seed")
        generator.set_state(state)
        _assert_alike(way.draw(device, generator=generator), more, way, "state")
        if way.count > 1:
            assert not torch.equal(first, more), f"{way} from its own generator repeats itself"
        assert torch.equal(backend.rng_state(index), before), (
            f"{way} from its own generator moves the default one of device {index}"
        )


def _assert_alike(found: torch.Tensor, wanted: torch.Tensor, way: Way, what: str) -> None:
    assert torch.equal(found.cpu(), wanted), f"{way} does not follow its own generator's {what}"


@two_devices
def test_RNG_004_draws_elsewhere(subject: Subject) -> None:
    """No way to draw on one device moves another's state.

    Found: a draw on one device changed the numbers of another.
    Fix: take the generator of the tensor's device, not of the current one.
    """
    for here, there in subject.both_ways():
        for way in working(ways(subject), subject.device(here)):
            if way.count < _HUGE:
                before = subject.backend.rng_state(there)
                way.draw(subject.device(here)).cpu()
                assert torch.equal(subject.backend.rng_state(there), before), (
                    f"{way} on device {here} moves the state of device {there}"
                )


def _follow(subject: Subject, program: list[tuple[Way, int]], situation: Situation) -> None:
    backend = subject.backend
    here = f" in {situation!r}"
    host = torch.get_rng_state()

    def run() -> list[torch.Tensor]:
        return [way.draw(subject.device(index)).cpu() for way, index in program]

    def states() -> dict[int, torch.Tensor]:
        return {index: backend.rng_state(index) for index in subject.indices}

    def assert_same(one: list[torch.Tensor], other: list[torch.Tensor], what: str) -> None:
        for (way, index), a, b in zip(program, one, other, strict=True):
            assert torch.equal(a, b), f"{way} on device {index} does not follow the {what}{here}"

    backend.manual_seed_all(77)
    first = run()
    kept = states()
    copies = {index: state.clone() for index, state in kept.items()}
    more = run()
    end = states()
    for index, state in kept.items():
        assert torch.equal(state, copies[index]), f"device {index}'s state changed in its holder"
    backend.manual_seed_all(77)
    assert_same(first, run(), "seed")
    for index, state in kept.items():
        assert torch.equal(backend.rng_state(index), state), f"states differ after one seed{here}"
        backend.set_rng_state(state, index)
        assert torch.equal(state, copies[index]), "set_rng_state changed the state it was given"
    assert_same(more, run(), "state")
    for index, state in states().items():
        assert torch.equal(state, end[index]), f"states differ after one state{here}"
    for way, index in program:  # one directly after the other
        one, two = (way.draw(subject.device(index)).cpu() for _ in range(2))
        assert way.count == 1 or not torch.equal(one, two), (
            f"{way} on device {index} repeats itself{here}"
        )
        _assert_no_block_twice(way, one, two, here)
        if way.count == 1:
            drawn = {way.draw(subject.device(index)).item() for _ in range(4)}
            assert len(drawn) > 1, f"{way} on device {index} does not move the state{here}"
    if not subject.is_host:
        assert torch.equal(torch.get_rng_state(), host), f"the host's generator moved{here}"


def _assert_no_block_twice(way: Way, one: torch.Tensor, two: torch.Tensor, here: str) -> None:
    """Of many numbers, a few in a row come once: the first and last ones, of it and the next."""
    size = way.block
    if one.numel() < 4 * size:
        return
    flat, after = one.flatten(), two.flatten()
    both = torch.cat([flat, after])
    text = both.view(torch.uint8).numpy().tobytes()
    for block in (flat[:size], flat[-size:], after[:size], after[-size:]):
        piece = block.clone().view(torch.uint8).numpy().tobytes()
        assert text.find(piece) == text.rfind(piece), f"{way} gave {size} numbers twice{here}"
