"""Numbers that were drawn, against what they should be: each is turned into one of [0, 1).

A number of a continuous distribution is turned by its distribution function; one that is rounded,
or of a discrete distribution, to a chance place between the shares below it and up to it. What
comes of it is uniform for every distribution and every parameter, so that one check does for all.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Final, TypeVar

import torch

from anydevice_conformance.data import short_name
from anydevice_conformance.subject import Subject

__all__ = ["FLOATS", "Trial", "assert_correlated_by_chance", "assert_uniform", "below_normal"]

T = TypeVar("T")

FLOATS: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_SHARES: Final = (0.001, 0.004, 0.02, *(n / 20 for n in range(1, 20)), 0.98, 0.996, 0.999)
_LAGS: Final = (1, 2, 3, 4, 8, 31, 32, 64, 128, 256, 512, 1024, 4096)
_PERIODS: Final = (2, 4, 32, 64)
#: So many numbers say little.
_FEW: Final = 150
#: What stands where nothing was drawn yet; of no distribution's numbers.
_FILLED: Final = 99


@dataclasses.dataclass
class Trial:
    """What a way to draw is tried with.

    Attributes:
        subject: whose devices.
        device: on which is drawn.
        dice: chooses parameters.
        host: draws parameters, on the host.
        places: draws where a rounded number is turned to.
        count: about how many numbers are drawn.
        words: the distribution, and what was chosen, for a reader.
        seed: of the choices.
        turn: which of its trials this is.
        slack: how far a share may be off, by rounding.
    """

    subject: Subject
    device: torch.device
    dice: random.Random
    host: torch.Generator
    places: torch.Generator
    count: int
    words: list[str]
    seed: int
    turn: int
    slack: float = 0.0
    _whole: torch.Tensor | None = None
    _mask: torch.Tensor | None = None
    _choices: int = 0

    def one_of(self, *values: T) -> T:
        """A choice, which is noted; from turn to turn each value comes."""
        self._choices += 1
        start = random.Random(f"{self.seed} {self.words[0]} {self._choices}").randrange(len(values))
        rounds = self.turn // len(values)
        chosen = values[(start + self.turn + rounds * self._choices) % len(values)]
        self.words.append(short_name(chosen) if isinstance(chosen, torch.dtype) else f"{chosen}")
        return chosen

    def dtype(self, *dtypes: torch.dtype) -> torch.dtype:
        """A dtype that the device has."""
        found = self.subject.supported(*dtypes)
        dtype: torch.dtype = self.one_of(*found)
        if dtype.is_floating_point and dtype.itemsize < 4:
            self.slack = 2 * torch.finfo(dtype).eps
        return dtype

    def shape(self, wide: bool = False) -> tuple[int, ...]:
        """A shape of about as many elements as shall be drawn; ``wide`` of several dimensions."""
        side = math.isqrt(self.count)
        exact = 1 << (self.count.bit_length() - 1)
        several: list[tuple[int, ...]] = [(side, side + 2), (3, 5, side // 4, side // 4 + 1)]
        if wide:
            return self.one_of(*several)
        return self.one_of(
            (self.count + 3,),
            *several,
            (1, self.count),
            (exact,),
            (exact + 1,),
            (exact // 32 - 1, 1, 33),
        )

    def target(
        self, dtype: torch.dtype, shape: tuple[int, ...] | None = None, *, plain: bool = False
    ) -> torch.Tensor:
        """A tensor to be filled, in some layout: `seen` looks at what stands around it."""
        shape = shape or self.shape()
        layouts = ["dense", "dense", "transposed", "with gaps", "each other one", "behind others"]
        layout = self.one_of(*layouts[: None if self.subject.strided and not plain else 1])
        last = shape[-1]
        sizes = {
            "transposed": shape[::-1],
            "with gaps": (*shape[:-1], last + 3),
            "each other one": (*shape[:-1], 2 * last),
            "behind others": (shape[0] + 1, *shape[1:]),
        }
        whole = torch.full(sizes.get(layout, shape), _FILLED, dtype=torch.float64)
        whole = whole.to(dtype).to(self.device)
        mask = torch.zeros(whole.shape, dtype=torch.bool)

        def part(of: torch.Tensor) -> torch.Tensor:
            if layout == "transposed":
                return of.permute(tuple(range(of.dim()))[::-1])
            if layout == "with gaps":
                return of[..., 2 : last + 2]
            if layout == "each other one":
                return of[..., 1::2]
            return of[1:] if layout == "behind others" else of

        part(mask).fill_(True)
        self._whole, self._mask = whole, mask
        return part(whole)

    def tensor(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Parameters on the device; the values are rounded to what they are there."""
        rounded = values.to(dtype)
        values.copy_(rounded)
        if self.subject.strided and values.dim() > 1 and self.dice.random() < 0.6:
            self.words.append("of transposed parameters")
            back = tuple(range(values.dim()))[::-1]
            return rounded.permute(back).contiguous().to(self.device).permute(back)
        return rounded.to(self.device)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Numbers of the host, in float64."""
        return torch.rand(shape, generator=self.host, dtype=torch.float64)

    def seen(self, drawn: torch.Tensor) -> torch.Tensor:
        """What was drawn, on the host, in float64; what stands around it must be as it was."""
        found = drawn.detach().cpu()
        if self._whole is not None and self._mask is not None:
            around = self._whole.cpu()[~self._mask]
            wanted = torch.full((), _FILLED).to(around.dtype)
            assert around.eq(wanted).all(), f"{self}: a draw changed what stands around its target"
            self._whole = None
        return found.double()

    def between(self, below: torch.Tensor, up_to: torch.Tensor) -> torch.Tensor:
        """By chance between the share of what is below a number, and of what is up to it."""
        chance = torch.rand(below.shape, generator=self.places, dtype=torch.float64)
        return below + chance * (up_to - below)

    def __repr__(self) -> str:
        return " ".join(self.words)


def below_normal(places: torch.Tensor) -> torch.Tensor:
    """The shares of the standard normal distribution that are below places."""
    shares: torch.Tensor = torch.special.ndtr(places)
    return shares


def assert_uniform(found: torch.Tensor, trial: Trial) -> None:
    """Check shares, the means of places, and that no number says something of a later one.

    Raises:
        AssertionError: more or fewer than six standard errors allow; the message says what.
    """
    flat = found.flatten()
    count = flat.numel()
    assert flat.isfinite().all(), f"{trial} gave what is no number, or has no chance"
    if count < _FEW:
        return
    shares = torch.tensor(_SHARES, dtype=torch.float64)
    below = (flat[:, None] < shares).sum(0, dtype=torch.float64)
    allowed = 6 * (count * shares * (1 - shares)).sqrt() + 6 + trial.slack * count
    for share, number, most in zip(_SHARES, below.tolist(), allowed.tolist(), strict=True):
        assert abs(number - share * count) <= most, (
            f"{trial}: below the quantile of {share:g} lie {number / count:.4g} of {count}"
        )
    for period in _PERIODS:
        rows = count // period
        if rows >= 12:
            flat_rows = flat[: rows * period]
            for means, what in (
                (flat_rows.view(rows, period).mean(0), f"each {period}th number"),
                (flat_rows.view(period, rows).mean(1), f"one of {period} parts"),
            ):
                size = rows
                most = 6 / math.sqrt(12 * size) + trial.slack
                far = (means - 0.5).abs().max().item()
                assert far <= most, f"{trial}: {what} is too high or too low by {far:.3g} in mean"
    centred = flat - flat.mean()
    for lag in _LAGS:
        if lag * 4 < count:
            words = f"{trial}: a number and the one {lag} later"
            assert_correlated_by_chance(centred[:-lag], centred[lag:], words)


def assert_correlated_by_chance(one: torch.Tensor, other: torch.Tensor, words: str) -> None:
    """Neither numbers nor their distances from the middle go together, or against one another."""
    for kind in (lambda x: x, torch.abs):
        first, second = kind(one), kind(other)
        first, second = first - first.mean(), second - second.mean()
        scale = (first.square().mean() * second.square().mean()).sqrt().item()
        if scale < 1e-6:
            continue
        found = (first * second).mean().item() / scale
        assert abs(found) < 7 / math.sqrt(one.numel()) + 1e-3, f"{words} go together ({found:.3f})"
