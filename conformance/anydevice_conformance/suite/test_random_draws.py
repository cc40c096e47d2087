"""RNG: every way to draw."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import functools
import random
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

    def law(example: tuple[list[tuple[Way, int]], Situation, Situation]) -> None:
        program, situation, other = example
        follow = functools.partial(_follow, subject, program, situation)
        expected = run_in(subject, situation, follow)
        if situation.ambient == other.ambient:
            again = functools.partial(_again, subject, program, expected, situation, other)
            run_in(subject, other, again)

    plain = situations(subject)
    hold(subject, st.tuples(draws, plain, plain), law, examples=60)


#: What came after a seed, the states after that, and what came then.
_Came = tuple[list[torch.Tensor], dict[int, torch.Tensor], list[torch.Tensor]]


def _again(
    subject: Subject,
    program: list[tuple[Way, int]],
    expected: _Came,
    one: Situation,
    other: Situation,
) -> None:
    """Elsewhere the same comes after the same seed and states."""
    first, states, more = expected
    subject.backend.manual_seed_all(77)
    for wanted in (first, more):
        for (way, index), value in zip(program, wanted, strict=True):
            found = way.draw(subject.device(index)).cpu()
            assert torch.equal(found, value), (
                f"{way} on device {index} gives other numbers in {other!r} than in {one!r}"
            )
        for index, state in states.items():
            subject.backend.set_rng_state(state, index)


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


def _follow(subject: Subject, program: list[tuple[Way, int]], situation: Situation) -> _Came:
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
    return first, copies, more


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
