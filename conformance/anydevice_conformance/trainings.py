"""Generated trainings: which optimizers take which steps, and how they are interrupted."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any, Final

import torch

from anydevice_conformance.situations import Situation
from anydevice_conformance.subject import Subject

__all__ = ["ELSEWHERE", "USUAL", "Part", "Step", "Training", "trainings", "without"]

_BETAS: Final = (0.5, 0.7)
_ADAM: Final[tuple[dict[str, Any], ...]] = (
    {},
    {"amsgrad": True, "betas": _BETAS},
    {"weight_decay": 0.1, "maximize": True},
    {"amsgrad": True, "maximize": True, "eps": 0.01, "weight_decay": 0.2},
)
#: Optimizers of torch, and options; each group of an optimizer's parameters has some of them.
OPTIMIZERS: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "SGD": (
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "maximize": True},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.5, "nesterov": True, "weight_decay": 0.1},
        {},
    ),
    "Adam": (*_ADAM, {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "AdamW": _ADAM,
    "RMSprop": (
        {"momentum": 0.9, "centered": True},
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"momentum": 0.9, "alpha": 0.5},
    ),
    "Adagrad": ({}, {"lr_decay": 0.1}, {"weight_decay": 0.1, "maximize": True}, {"eps": 0.1}),
    "NAdam": (
        {"decoupled_weight_decay": True, "weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.1},
        {"momentum_decay": 0.1, "betas": _BETAS},
    ),
    "RAdam": (
        {},
        {"weight_decay": 0.1, "maximize": True},
        {"decoupled_weight_decay": True, "weight_decay": 0.1, "betas": _BETAS},
    ),
    "Adamax": ({}, {"weight_decay": 0.1, "maximize": True}, {"betas": _BETAS}),
    "Adadelta": ({}, {"weight_decay": 0.1, "maximize": True}, {"rho": 0.5}),
    "ASGD": ({}, {"weight_decay": 0.1, "maximize": True}, {"lambd": 0.1, "alpha": 0.5}),
    "Rprop": ({}, {"etas": (0.25, 2.0), "maximize": True}),
    "Adafactor": ({}, {"weight_decay": 0.1, "d": 0.5, "maximize": True}),
}
USUAL: Final = ("SGD", "Adam", "AdamW")
#: Those that torch can take with numbers of steps on the device.
_CAPTURABLE: Final = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "RMSprop")
#: What a step may bring besides; "plain" is none of it.
_EXTRAS: Final = (
    "plain",
    "norm 2",
    "norm inf",
    "norm 1",
    "norm 3",
    "value",
    "accumulated",
    "kept",
    "new scale",
)
#: Options of loss scalers: large scales, and those at and below 1, which fall as others do.
_SCALERS: Final[tuple[dict[str, Any], ...]] = (
    {"init_scale": 1.0, "growth_interval": 2, "backoff_factor": 0.25},
    {"init_scale": 256.0, "growth_interval": 2},
    {"init_scale": 65536.0, "growth_interval": 1, "growth_factor": 4.0},
    {"init_scale": 0.5, "growth_interval": 2, "growth_factor": 1.5, "backoff_factor": 0.75},
)
#: How training is interrupted: by what, and where `torch.load` maps to.
ELSEWHERE: Final = "saved to another device"
_STOPS: Final = (ELSEWHERE, "saved", "copied", "saved to the host")
#: So many parameters of a list are more than one call of a device's kernels takes.
_MANY: Final = 130
_BIG: Final = 100_003
_SHAPES: Final[tuple[tuple[int, ...], ...]] = (
    (3,),
    (2, 3),
    (),
    (1, 1, 5),
    (1,),
    (2, 3, 2, 2),
    (65, 33),
    (129,),
    (7, 1),
)


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a training.

    Attributes:
        extra: what it brings besides the gradients.
        limit: of the gradients' norm, where that is clipped.
        overflow: which part's which parameter's gradient has which value, at which share of its
            elements; None where all are finite.
    """

    extra: str
    limit: float = 0.5
    overflow: tuple[int, int, float, float] | None = None


@dataclasses.dataclass(frozen=True)
class Part:
    """What one optimizer does in a training.

    Attributes:
        optimizer: a key of `OPTIMIZERS`.
        form: "plain", "foreach" or "fused"; a device need have the first one only.
        groups: options of each group of its parameters.
        own: options that it has on the device only.
        rate: whether the learning rate is a number, or a tensor.
        shapes: of its parameters.
        mixed: whether some of them are of bfloat16.
    """

    optimizer: str
    form: str
    groups: tuple[dict[str, Any], ...]
    own: dict[str, Any]
    rate: str
    shapes: tuple[tuple[int, ...], ...]
    mixed: bool

    def __repr__(self) -> str:
        words = [f"{self.form} {self.optimizer} of groups {list(self.groups)}"]
        words += [f"{name}={value}" for name, value in self.own.items()]
        if self.rate != "a number":
            words.append(f"its learning rate {self.rate}")
        words.append(f"{len(self.shapes)} parameters" + ", some of bfloat16" * self.mixed)
        return f"<{', '.join(words)}>"


@dataclasses.dataclass(frozen=True)
class Training:
    """A training.

    Attributes:
        parts: an optimizer each.
        spread: whether every other parameter is on the next device.
        wide: whether some parameters are of float64.
        scaled: options of the loss scaler; None without one.
        steps: that are taken.
        stop: how it is interrupted; None for not at all.
        stop_after: how many steps are taken before.
        situation: in which it is done.
        seed: of parameters and gradients.
    """

    parts: tuple[Part, ...]
    spread: bool
    wide: bool
    scaled: dict[str, Any] | None
    steps: tuple[Step, ...]
    stop: str | None
    stop_after: int
    situation: Situation
    seed: int


def without(training: Training, refused: list[Part]) -> Training:
    """A training without some of its optimizers."""
    kept = [number for number, part in enumerate(training.parts) if part not in refused]
    steps = [
        dataclasses.replace(step, overflow=(kept.index(step.overflow[0]), *step.overflow[1:]))
        if step.overflow is not None and step.overflow[0] in kept
        else dataclasses.replace(step, overflow=None)
        for step in training.steps
    ]
    parts = tuple(training.parts[number] for number in kept)
    return dataclasses.replace(training, parts=parts, steps=tuple(steps))


def trainings(subject: Subject, count: int) -> Iterator[Training]:
    """So many trainings: each optimizer in each form by turns, the usual ones more often."""
    dice = random.Random(subject.seed)
    usual = [(name, form) for form in ("fused", "foreach", "plain") for name in USUAL]
    rare = [(name, form) for form in ("foreach", "plain") for name in OPTIMIZERS]
    rare = [("Adagrad", "fused"), *(pair for pair in rare if pair not in usual)]
    rare.remove(("Adafactor", "foreach"))  # in torch itself the two forms differ
    captures = _captures(subject)
    for number in range(count):
        # Of three in a row, each usual one in each form; beside them, rarer ones.
        pairs = [usual[(3 * number + n) % 9] for n in range(3)]
        pairs += [rare[(4 * number + n) % len(rare)] for n in range(4)]
        yield _one(subject, dice, number, pairs, captures)


def _one(
    subject: Subject,
    dice: random.Random,
    number: int,
    pairs: list[tuple[str, str]],
    captures: bool,
) -> Training:
    scaled = subject.capabilities.grad_scaling and number % 4 != 1
    stop = _STOPS[number % 4] if number % 5 != 4 else None
    spread = len(subject.indices) > 1 and number % 3 == 1 and stop != ELSEWHERE
    # torch itself rounds the rarer optimizers' states to 16 bits as it loads them
    mixed = number % 4 < 2 and bool(subject.supported(torch.bfloat16))
    parts = tuple(
        _part(dice, number + place, name, form, mixed and name in USUAL, captures)
        for place, (name, form) in enumerate(pairs)
    )
    extras = _EXTRAS if scaled else _EXTRAS[:-1]
    steps = [
        Step(extra, dice.choice((0.5, 0.5, 1e6)))
        for extra in dice.sample(extras[1:], len(extras) - 1)[:5]
    ]
    steps.insert(1, Step("plain"))
    if scaled:  # the first step makes the optimizers' states, the last ones grow the scale
        steps[1] = Step("plain", overflow=_overflow(dice, parts, number % 3))
        if dice.random() < 0.5:
            steps[4] = Step("plain", overflow=_overflow(dice, parts, dice.randrange(len(parts))))
    index = subject.indices[number % len(subject.indices)]
    return Training(
        parts=parts,
        spread=spread,
        wide=number % 2 == 0 and bool(subject.supported(torch.float64)),
        scaled=_SCALERS[number % len(_SCALERS)] if scaled else None,
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


def _captures(subject: Subject) -> bool:
    """Whether torch lets the device's optimizers keep their numbers of steps there."""
    try:
        parameter = torch.nn.Parameter(torch.ones(3, device=subject.device(subject.indices[0])))
        parameter.grad = torch.ones_like(parameter)
        torch.optim.Adam([parameter], capturable=True).step()
    except Exception:  # noqa: BLE001 - it says so in several ways
        return False
    return True


def _part(
    dice: random.Random, place: int, name: str, form: str, mixed: bool, captures: bool
) -> Part:
    options = OPTIMIZERS[name]
    own = {}
    if captures and name in _CAPTURABLE and form != "fused" and dice.random() < 0.3:
        own["capturable"] = True
    rates = ["a number"]
    if name in USUAL and (form != "foreach" or name == "SGD" or own):
        rates.append("a tensor")
    few = tuple(dice.sample(_SHAPES, 6))
    shapes = list(few)
    if place % 3 == 0:
        shapes = [(_BIG,), *few[1:]]
    elif place % 3 == 1 and name in USUAL and form != "plain":
        shapes = [_SHAPES[number % 6] for number in range(_MANY)]
    return Part(
        optimizer=name,
        form=form,
        # Of many, one group has more than one call of a device's kernels takes.
        groups=tuple(dice.sample(options, 1 if len(shapes) == _MANY else len(options))),
        own=own,
        rate=dice.choice(rates),
        shapes=(*shapes, (0,)) if name != "Adafactor" else tuple(shapes),  # torch divides by it
        mixed=mixed,
    )


def _overflow(
    dice: random.Random, parts: tuple[Part, ...], part: int
) -> tuple[int, int, float, float]:
    """Where a gradient is not finite: in a large one near its end."""
    shapes = parts[part].shapes
    place = 0 if shapes[0] == (_BIG,) else dice.choice((0, len(shapes) // 2, len(shapes) - 2))
    value = dice.choice((float("inf"), float("-inf"), float("nan")))
    return part, place, dice.choice((0.0, 0.5, 1.0) if place else (0.8, 1.0)), value
