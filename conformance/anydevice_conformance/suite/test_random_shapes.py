"""RNG: the shapes of distributions, at their ends as in the middle."""
# ruff: noqa: N802 - a check's name carries its paragraph's id

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Final

import torch

from anydevice_conformance.marks import needs
from anydevice_conformance.subject import Subject

pytestmark = needs("device_rng")

Draw = Callable[[int, torch.device], torch.Tensor]
_COUNT: Final = 100_003
#: Shares of the numbers; below the quantile of a share lie so many, within six standard errors.
_SHARES: Final = (0.001, 0.004, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98, 0.996, 0.999)
#: No number of 2**23 or more comes so often among `_COUNT`.
_OFTEN: Final = 12
_SHARE: Final = torch.tensor(_SHARES, dtype=torch.float64)
_NORMAL: Final = torch.special.ndtri(_SHARE)


def _empty(count: int, device: torch.device) -> torch.Tensor:
    return torch.empty(count, device=device)


#: Name to a way to draw, and the quantiles of `_SHARES`.
_CONTINUOUS: Final[dict[str, tuple[Draw, torch.Tensor]]] = {
    "rand": (lambda n, d: torch.rand(n, device=d), _SHARE),
    "randn": (lambda n, d: torch.randn(n, device=d), _NORMAL),
    "uniform_(-3, 5)": (lambda n, d: _empty(n, d).uniform_(-3, 5), 8 * _SHARE - 3),
    "normal_(-2, 0.5)": (lambda n, d: _empty(n, d).normal_(-2, 0.5), 0.5 * _NORMAL - 2),
    "exponential_(0.25)": (lambda n, d: _empty(n, d).exponential_(0.25), -4 * (-_SHARE).log1p()),
    "log_normal_(1, 0.5)": (
        lambda n, d: _empty(n, d).log_normal_(1, 0.5),
        (1 + 0.5 * _NORMAL).exp(),
    ),
    "cauchy_(1, 2)": (
        lambda n, d: _empty(n, d).cauchy_(1, 2),
        1 + 2 * (math.pi * (_SHARE - 0.5)).tan(),
    ),
    "randn_like": (lambda n, d: torch.randn_like(_empty(n, d)), _NORMAL),
}
#: Name to a way to draw ones with a probability.
_ONES: Final[dict[str, Callable[[int, torch.device, float], torch.Tensor]]] = {
    "bernoulli_": lambda n, d, p: _empty(n, d).bernoulli_(p),
    "bernoulli": lambda n, d, p: torch.bernoulli(torch.full((n,), p, device=d)),
    "dropout": lambda n, d, p: (
        torch.nn.functional.dropout(torch.ones(n, device=d), 1 - p, training=True) > 0
    ),
    "multinomial": lambda n, d, p: torch.multinomial(
        torch.tensor([1 - p, p]).to(d), n, replacement=True
    ),
}


def test_RNG_006_quantiles(subject: Subject, index: int) -> None:
    """Numbers lie below each quantile of their distribution as often as they should.

    Found: too many or too few at one end or in the middle, a bound that is reached, or one number
    that comes again and again.
    Fix: make them of as many random bits as the dtype has digits; leave out nothing at the ends.
    """
    subject.backend.manual_seed_all(subject.seed + 21)
    for name, (draw, quantiles) in _CONTINUOUS.items():
        try:
            found = subject.fetch(draw(_COUNT, subject.device(index))).double()
        except (NotImplementedError, RuntimeError):
            continue  # it need not have all
        if "cauchy" not in name:
            assert found.isfinite().all(), f"{name} gave what is not finite"
        zeros = int((found == 0).sum())  # one of 2**24 may come by chance
        assert zeros < 3 or "exponential" not in name, f"{name} gave 0 {zeros} times"
        for share, quantile in zip(_SHARES, quantiles.tolist(), strict=True):
            _assert_share(found < quantile, share, f"{name}: below {quantile:.4g}")
        ordered = found.sort().values  # one that comes so often stands again so much later
        often = int((ordered[_OFTEN:] == ordered[:-_OFTEN]).sum())
        assert not often, f"{name} gave one number more than {_OFTEN} times among {_COUNT}"


def test_RNG_006_probabilities(subject: Subject, index: int) -> None:
    """What is drawn with a probability comes as often, also where that is close to 0 or 1.

    Found: a probability that is rounded, or one of 0 or 1 that is not obeyed.
    Fix: compare a random number of as many digits as the probability has.
    """
    subject.backend.manual_seed_all(subject.seed + 22)
    dice = random.Random(subject.seed)
    for name, draw in _ONES.items():
        ends = [0.0, 1.0] if name != "multinomial" else []
        for share in (*ends, 0.003, 0.997, round(dice.uniform(0.01, 0.99), 4)):
            try:
                found = subject.fetch(draw(_COUNT, subject.device(index), share))
            except (NotImplementedError, RuntimeError):
                break
            ones = found.bool()
            assert found.double().eq(ones.double()).all(), f"{name} gave other than 0 and 1"
            _assert_share(ones, share, f"{name} with the probability {share}")


def _assert_share(found: torch.Tensor, share: float, what: str) -> None:
    count = int(found.sum())
    allowed = 6 * math.sqrt(found.numel() * share * (1 - share)) + (0 < share < 1)
    wanted = share * found.numel()
    assert abs(count - wanted) <= allowed, f"{what} come {count} of {found.numel()}, not {wanted:g}"
