"""RNG: the shapes of distributions, at their ends as in the middle."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from anydevice_conformance.chances import Trial, assert_correlated_by_chance, assert_uniform
from anydevice_conformance.distributions import DISTRIBUTIONS
from anydevice_conformance.distributions_of_choices import CHOICES
from anydevice_conformance.laws import hold_each
from anydevice_conformance.marks import needs
from anydevice_conformance.situations import Situation, parts_of_situations, run_in
from anydevice_conformance.subject import Subject

pytestmark = needs("device_rng")

_ALL: Final = DISTRIBUTIONS | CHOICES
#: So many numbers have some of the rarest: of the share 1e-5 none would come once in 1e9 times.
_DEEP: Final = 1 << 21
_RARE: Final = 1e-5
#: Among so many float32 of 2**23 or more values, few come twice.
_APART: Final = 1 << 18


@dataclasses.dataclass(frozen=True)
class _Case:
    name: str
    turn: int
    situation: Situation

    def __repr__(self) -> str:
        return f"{self.name} number {self.turn} in {self.situation!r}"


def _cases(subject: Subject, rounds: int) -> Iterator[_Case]:
    dice = random.Random(subject.seed)
    parts = parts_of_situations(subject)
    for number in range(rounds):
        for name in _ALL:
            kinds = {key: dice.choice(values) for key, values in parts.items()}
            kinds["ambient"] = dice.choice(["", kinds["ambient"]])
            if name in CHOICES:
                kinds["mode"] = "enable_grad"  # their gradients are looked at
            yield _Case(name, number, Situation(**kinds))


def test_RNG_006_distributions(subject: Subject) -> None:
    """Each way to draw obeys its parameters, in each dtype, layout and size.

    Found: a bound that is left or never reached; a share that is not what bounds, mean, deviation,
    rate or probability say; numbers that go together; or what stands around the target changed.
    Fix: pass all parameters on to the kernel, each element's own; make numbers of as many random
    bits as the dtype has digits; the upper bound of `rand` and `randint` is left out.
    """
    subject.backend.manual_seed_all(subject.seed + 12)
    count = 4000 if subject.quick else 12_000

    def law(case: _Case) -> None:
        run_in(subject, case.situation, functools.partial(_try, subject, case, count))

    hold_each(subject, _cases(subject, subject.examples(42)), law, lambda case: ())


def _try(subject: Subject, case: _Case, count: int) -> None:
    seed = 1000 * subject.seed + case.turn
    turns: list[tuple[Trial, torch.Tensor]] = []
    for turn in range(2):  # twice the same: the second numbers know nothing of the first ones
        trial = Trial(
            subject=subject,
            device=subject.device(case.situation.index),
            dice=random.Random(f"{case.name} {seed}"),
            host=torch.Generator().manual_seed(seed),
            places=torch.Generator().manual_seed(7919 * (seed + 1) + turn + 1),
            count=count,
            words=[case.name],
            seed=subject.seed,
            turn=case.turn,
        )
        try:
            turns.append((trial, _ALL[case.name](trial)))
        except (NotImplementedError, RuntimeError):
            return  # it need not have all
    (trial, first), (_, second) = turns
    assert_uniform(torch.cat([first.flatten(), second.flatten()]), trial)
    if first.shape == second.shape and first.numel() > 100:
        words = f"{trial}: numbers of one draw and of the next"
        assert_correlated_by_chance(first.flatten(), second.flatten(), words)


Draw = Callable[[torch.device], torch.Tensor]
_Quantiles = tuple[float, float]
_NORMAL: Final = float(torch.special.ndtri(torch.tensor(1 - _RARE, dtype=torch.float64)))


def _empty(device: torch.device) -> torch.Tensor:
    return torch.empty(_DEEP, device=device)


#: Name to a way to draw, and where its rarest small and large numbers begin.
_DEEP_DRAWS: Final[dict[str, tuple[Callable[[torch.device], Any], _Quantiles]]] = {
    "rand": (lambda d: torch.rand(_DEEP, device=d), (_RARE, 1 - _RARE)),
    "randn": (lambda d: torch.randn(_DEEP, device=d), (-_NORMAL, _NORMAL)),
    "exponential_": (lambda d: _empty(d).exponential_(), (_RARE, 11.512925)),
    "normal_": (lambda d: _empty(d).normal_(), (-_NORMAL, _NORMAL)),
    "uniform_": (lambda d: _empty(d).uniform_(), (_RARE, 1 - _RARE)),
}


#: Name to a way to draw many ones with a probability.
_ONES: Final[dict[str, Callable[[torch.device, float], Any]]] = {
    "bernoulli_": lambda d, p: torch.empty(_APART, device=d).bernoulli_(p),
    "bernoulli": lambda d, p: torch.bernoulli(torch.full((_APART,), p, device=d)),
    "dropout": lambda d, p: torch.nn.functional.dropout(torch.ones(_APART, device=d), 1 - p, True),
    "multinomial": lambda d, p: torch.multinomial(
        torch.tensor([1 - p, p]).to(d), _APART, replacement=True
    ),
}


def test_RNG_006_probabilities(subject: Subject) -> None:
    """What is drawn with a probability comes as often, also where that is close to 0 or 1.

    Found: a probability that is rounded.
    Fix: compare a random number of as many digits as the probability has.
    """
    subject.backend.manual_seed_all(subject.seed + 22)
    for number, (name, draw) in enumerate(_ONES.items()):
        index = subject.indices[number % len(subject.indices)]
        for share in (0.003, 0.997):
            try:
                found = subject.fetch(draw(subject.device(index), share))
            except (NotImplementedError, RuntimeError):
                break
            ones, wanted = int(found.bool().sum()), share * _APART
            assert abs(ones - wanted) < 6 * math.sqrt(wanted * (1 - share)) + 1, (
                f"{name} with the probability {share} gave {ones} ones of {_APART}, not {wanted:g}"
            )


def test_RNG_006_rare_numbers(subject: Subject) -> None:
    """Among millions of numbers there are rare ones, and few are alike.

    Found: no number is as small or as large as some should be, or many are the same.
    Fix: make them of as many random bits as the dtype has digits; leave out nothing at the ends.
    """
    backend = subject.backend
    names = list(_DEEP_DRAWS)[: 3 if subject.quick else None]
    for number, name in enumerate(names):
        draw, (low, high) = _DEEP_DRAWS[name]
        index = subject.indices[number % len(subject.indices)]
        backend.manual_seed_all(subject.seed + 21)
        try:
            found = subject.fetch(draw(subject.device(index)))
        except (NotImplementedError, RuntimeError):
            continue  # it need not have all, nor room for them
        for few, end in ((found < low, "small"), (found > high, "large")):
            count = int(few.sum())
            assert 0 < count < 3 * _RARE * _DEEP + 20, (
                f"{name} gave {count} very {end} numbers of {_DEEP}, not about {_RARE * _DEEP:g}"
            )
        some = len(set(found[-_APART:].tolist()))
        assert some > 0.96 * _APART, f"{name}: of {_APART} numbers only {some} differ"
