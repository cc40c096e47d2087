"""Ways to draw random numbers, each of several sizes, dtypes and layouts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import torch

from anydevice_conformance.data import short_name
from anydevice_conformance.subject import Subject

__all__ = ["Way", "ways", "working"]

Draw = Callable[..., torch.Tensor]
functional: Any = torch.nn.functional


def _made(name: str) -> Draw:
    """A function that makes a tensor; also of ``generator=``."""

    def draw(like: torch.Tensor, **generator: Any) -> torch.Tensor:
        make = getattr(torch, name)
        made: torch.Tensor = make(like.shape, device=like.device, dtype=like.dtype, **generator)
        return made

    return draw


def _filled(name: str, *arguments: float) -> Draw:
    """A method that fills a tensor of the layout that is given."""

    def draw(like: torch.Tensor, **generator: Any) -> torch.Tensor:
        copy = like.clone(memory_format=torch.preserve_format)
        getattr(copy, name)(*arguments, **generator)
        return copy

    return draw


def _chosen(like: torch.Tensor, **generator: Any) -> torch.Tensor:
    weights = torch.arange(7.0, device=like.device)
    return torch.multinomial(weights, like.numel(), replacement=True, **generator)


#: Name to a way to draw that takes a generator, too; called with a tensor of ones.
_DRAWS: Final[dict[str, Draw]] = {
    "rand": _made("rand"),
    "randn": _made("randn"),
    "randint": lambda like, **g: torch.randint(0, 1000, like.shape, device=like.device, **g),
    "randperm": lambda like, **g: torch.randperm(like.numel(), device=like.device, **g),
    "normal_": _filled("normal_", 2.0, 3.0),
    "uniform_": _filled("uniform_", -1, 1),
    "bernoulli_": _filled("bernoulli_", 0.5),
    "exponential_": _filled("exponential_"),
    "log_normal_": _filled("log_normal_"),
    "cauchy_": _filled("cauchy_"),
    "geometric_": _filled("geometric_", 0.2),
    "random_": _filled("random_", 0, 900),
    "multinomial": _chosen,
    "bernoulli": lambda like, **g: torch.bernoulli(like / 2, **g),
    "normal": lambda like, **g: torch.normal(like, like, **g),
    "poisson": lambda like, **g: torch.poisson(9 * like, **g),
}
#: Ways that draw from the default generator only.
_DEFAULT: Final[dict[str, Draw]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda like: torch.randint_like(like, 0, 1000),
    "dropout": lambda like: functional.dropout(like, 0.5, training=True),
    "feature_dropout": lambda like: functional.dropout1d(like.view(1, -1, 1), 0.5, training=True),
    "rrelu": lambda like: functional.rrelu(-like, training=True),
}
_SMALL: Final = 37
#: Where a block, a grid or a counter of 16 bits ends; the last two are not tried on each device.
_SIZES: Final = (1001, 20_001, 70_001, 131_075)
_SIZED: Final = ("rand", "randn", "randint", "randperm", "uniform_", "exponential_", "dropout")
_HALVES: Final = (torch.float64, torch.bfloat16, torch.float16)
_OF_DTYPES: Final = ("rand", "randn", "normal_", "uniform_", "dropout")


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to draw.

    Attributes:
        name: a key of the ways.
        shape: of what is drawn.
        dtype: of the tensor that it is drawn like.
        transposed: whether that is transposed.
    """

    name: str
    shape: tuple[int, ...] = (_SMALL,)
    dtype: torch.dtype = torch.float32
    transposed: bool = False

    def __repr__(self) -> str:
        kind = " transposed" if self.transposed else ""
        return f"{self.name} of {self.shape}{kind} like {short_name(self.dtype)}"

    @property
    def seeded(self) -> bool:
        """Whether it takes a generator."""
        return self.name in _DRAWS

    @property
    def count(self) -> int:
        """How many numbers it draws."""
        return torch.Size(self.shape).numel()

    @property
    def block(self) -> int:
        """So many numbers in a row never come twice: of two values more than of many."""
        return 64 if "dropout" in self.name or "bernoulli" in self.name else 16

    def draw(self, device: torch.device, **generator: torch.Generator) -> torch.Tensor:
        """Draw on a device; by a generator, or by the default one."""
        shape = self.shape[::-1] if self.transposed else self.shape
        like = torch.ones(shape, dtype=self.dtype, device=device)
        given = like.t() if self.transposed else like
        drawn: torch.Tensor = (_DRAWS | _DEFAULT)[self.name](given, **generator)
        return drawn


def ways(subject: Subject) -> list[Way]:
    """All ways of all kinds."""
    found = [Way(name) for name in (*_DRAWS, *_DEFAULT)]
    found += [Way(name, (1,)) for name in ("rand", "randn", "randint", "exponential_")]
    found += [Way(name, (size,)) for name in _SIZED for size in _SIZES]
    found += [Way(name, (3, 5, 7)) for name in ("rand", "randn", "dropout", "bernoulli_")]
    found += [Way(name, (9, 5), transposed=True) for name in ("normal_", "uniform_", "dropout")]
    dtypes = subject.supported(*_HALVES)
    return found + [Way(name, (65,), dtype) for name in _OF_DTYPES for dtype in dtypes]


def working(found: list[Way], device: torch.device) -> list[Way]:
    """Those that the device has: it need not have all."""
    kept = []
    for way in found:
        try:
            way.draw(device)
        except (NotImplementedError, RuntimeError):
            continue
        kept.append(way)
    assert Way("rand", (1001,)) in kept, "the device cannot draw numbers"
    return kept
