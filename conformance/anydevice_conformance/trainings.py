"""Generated trainings: which optimizer takes which steps, and how it is interrupted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice_conformance.situations import Situation
from anydevice_conformance.subject import Subject

__all__ = ["ELSEWHERE", "Step", "Training", "trainings"]

#: Optimizers of torch, and options of which each training has one.
OPTIMIZERS: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "SGD": ({"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
    "Adam": ({}, {"amsgrad": True, "betas": (0.5, 0.7)}, {"weight_decay": 0.1, "maximize": True}),
    "AdamW": ({"amsgrad": True, "betas": (0.5, 0.7)}, {}, {"weight_decay": 0.1}),
    "RMSprop": ({"momentum": 0.9, "centered": True}, {}),
    "Adagrad": ({}, {"lr_decay": 0.1}),
    "NAdam": ({"decoupled_weight_decay": True, "weight_decay": 0.1}, {}),
    "RAdam": ({}, {"weight_decay": 0.1}),
    "Adamax": ({}, {"weight_decay": 0.1}),
    "Adadelta": ({}, {"weight_decay": 0.1}),
    "ASGD": ({}, {"weight_decay": 0.1}),
    "Rprop": ({},),
}
_USUAL: Final = ("SGD", "Adam", "AdamW")
#: Ways to step; a device need have the first one only.
FORMS: Final = ("plain", "foreach", "fused")
#: What a step may bring besides; "plain" is none of it.
_EXTRAS: Final = ("plain", "norm 2", "norm inf", "norm 1", "value", "accumulated", "new scale")
#: How training is interrupted: by what, and where `torch.load` maps to.
ELSEWHERE: Final = "saved to another device"
_STOPS: Final = ("saved", "saved to the host", ELSEWHERE, "copied")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a training.

    Attributes:
        extra: what it brings besides the gradients.
        overflow: which parameter's gradient has which value, at which share of its elements; None
            where all are finite.
    """

    extra: str
    overflow: tuple[int, float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Training:
    """A training.

    Attributes:
        optimizer: a key of `OPTIMIZERS`.
        form: one of `FORMS`.
        options: of the optimizer.
        many: whether there are many small parameters, else few, of which one is big.
        mixed: whether some of them are of bfloat16.
        two: whether two optimizers share the parameters.
        scaled: whether there is a loss scaler.
        steps: that are taken.
        stop: how it is interrupted; None for not at all.
        stop_after: how many steps are taken before.
        situation: in which it is done.
        seed: of parameters and gradients.
    """

    optimizer: str
    form: str
    options: tuple[tuple[str, Any], ...]
    many: bool
    mixed: bool
    two: bool
    scaled: bool
    steps: tuple[Step, ...]
    stop: str | None
    stop_after: int
    situation: Situation
    seed: int


def trainings(subject: Subject, count: int) -> Iterator[Training]:
    """So many trainings: each optimizer in each form by turns, the usual ones more often."""
    dice = random.Random(subject.seed)
    usual = [(name, form) for name in _USUAL for form in FORMS[::-1]]
    rare = [(name, form) for name in OPTIMIZERS for form in FORMS[:2]][6:]
    order = [pair for turn in range(count) for pair in (*usual, rare[turn % len(rare)])]
    for number, (name, form) in enumerate(order[:count]):
        options = OPTIMIZERS[name]
        yield _one(subject, dice, number, name, form, options[number // 10 % len(options)])


def _one(
    subject: Subject,
    dice: random.Random,
    number: int,
    name: str,
    form: str,
    options: dict[str, Any],
) -> Training:
    scaled = subject.capabilities.grad_scaling and number % 4 != 3
    many = number % 4 < 3 if form == "foreach" else number % 4 == 2
    two = number % 4 == 2
    steps = [Step(dice.choice(_EXTRAS if scaled else _EXTRAS[:-1])) for _ in range(6)]
    if scaled:  # the first step makes the optimizer's state, the last ones grow the scale
        steps[1] = Step("plain", _overflow(dice, many, two))
        steps[4] = Step("plain", _overflow(dice, many) if dice.random() < 0.5 else None)
    stop = _STOPS[number // 2 % 4] if number % 5 else None
    index = subject.indices[number % len(subject.indices)]
    return Training(
        optimizer=name,
        form=form,
        options=tuple(options.items()),
        many=many,
        # torch itself rounds other optimizers' states to 16 bits as it loads them
        mixed=name in _USUAL
        and number % 4 < 2
        and torch.bfloat16 in subject.supported(torch.bfloat16),
        two=two,
        scaled=scaled,
        steps=tuple(steps),
        stop=stop,
        stop_after=dice.choice((1, 3, 3, 4)),
        situation=Situation(
            index,
            current=index if stop == ELSEWHERE else dice.choice(subject.indices),
            side_stream=subject.capabilities.streams and number % 3 == 0,
            thread=dice.random() < 0.2,
        ),
        seed=dice.randrange(1 << 30),
    )


def _overflow(dice: random.Random, many: bool, first: bool = False) -> tuple[int, float, float]:
    """Where a gradient is not finite; of two optimizers, in a parameter of the first one."""
    place = dice.choice((0, -1) if first else (0, 1, -1)) if many else 0
    value = dice.choice((float("inf"), float("-inf"), float("nan")))
    return place, dice.choice((0.0, 0.5, 1.0)) if many else dice.choice((0.8, 1.0)), value
