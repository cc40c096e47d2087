"""Ways to draw random numbers, each of several sizes, dtypes and layouts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn

from anydevice_conformance.data import short_name
from anydevice_conformance.subject import Subject

__all__ = ["Way", "ways", "working"]

Draw = Callable[..., torch.Tensor]
functional: Any = nn.functional


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


def _picked(like: torch.Tensor, **generator: Any) -> torch.Tensor:
    weights = (1 + torch.arange(90.0, device=like.device)).expand(5, 90)
    return torch.multinomial(weights, 40, **generator)


def _attention(like: torch.Tensor) -> torch.Tensor:
    rows = like.reshape(1, 1, -1, 1).expand(1, 2, like.numel(), 8)
    dropped: torch.Tensor = functional.scaled_dot_product_attention(rows, rows, rows, dropout_p=0.5)
    return dropped


@functools.cache
def _layer(kind: str, device: torch.device) -> Any:
    """A layer that drops, all of whose weights are alike."""
    if kind == "LSTM":
        made: Any = nn.LSTM(8, 8, 2, dropout=0.5, device="meta")
    else:
        made = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.5, device="meta")
    made.to_empty(device=device)  # as the host draws nothing for it
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    return made


def _through(kind: str) -> Draw:
    def draw(like: torch.Tensor) -> torch.Tensor:
        given = like.reshape(-1, 1, 1) * torch.linspace(-1, 1, 8).to(like.device)
        found = _layer(kind, like.device)(given)
        result: torch.Tensor = found[0] if kind == "LSTM" else found
        return result.detach()

    return draw


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
    "binomial": lambda like, **g: torch.binomial(90 * like, like / 2, **g),
    "gamma": lambda like, **g: torch._standard_gamma(3 * like, **g),
    "random_ without bounds": _filled("random_"),
    "wide randint": lambda like, **g: torch.randint(
        -(1 << 40), 1 << 41, like.shape, device=like.device, **g
    ),
    "multinomial without replacement": _picked,
    "normal of deviations": lambda like, **g: torch.normal(1.0, like, **g),
    "normal of means": lambda like, **g: torch.normal(like, 2.0, **g),
    "bernoulli_ by a tensor": lambda like, **g: (like / 2).bernoulli_(like / 2, **g),
    "trunc_normal_": lambda like, **g: nn.init.trunc_normal_(like.clone(), **g),
}
#: Ways that draw from the default generator only.
_DEFAULT: Final[dict[str, Draw]] = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda like: torch.randint_like(like, 0, 1000),
    "dropout": lambda like: functional.dropout(like, 0.5, training=True),
    "feature_dropout": lambda like: functional.dropout1d(like.view(1, -1, 1), 0.5, training=True),
    "dropout in place": lambda like: functional.dropout(like.clone(), 0.5, True, True),
    "native_dropout": lambda like: torch.native_dropout(like, 0.5, True)[0],
    "alpha_dropout": lambda like: functional.alpha_dropout(like, 0.5, training=True),
    "feature_alpha_dropout": lambda like: functional.feature_alpha_dropout(
        like.reshape(1, -1, 1), 0.5, training=True
    ),
    "attention's dropout": _attention,
    "gumbel_softmax": lambda like: functional.gumbel_softmax(like),
    "dirichlet": lambda like: torch._sample_dirichlet(like.reshape(-1, 1).expand(like.numel(), 3)),
    "LSTM's dropout": _through("LSTM"),
    "an encoder's dropout": _through("encoder"),
    "rrelu": lambda like: functional.rrelu(-like, training=True),
}
_SMALL: Final = 37
#: Where a block, a grid or a counter of 16 bits ends; the last two are not tried on each device.
_SIZES: Final = (1001, 20_001, 70_001, 131_075)
_SIZED: Final = ("rand", "randn", "randint", "randperm", "uniform_", "exponential_", "dropout")
_HALVES: Final = (torch.float64, torch.bfloat16, torch.float16)
_OF_DTYPES: Final = ("rand", "randn", "normal_", "uniform_", "dropout", "exponential_", "bernoulli")
_OF_OTHERS: Final[dict[torch.dtype, tuple[str, ...]]] = {
    torch.complex64: ("rand", "randn", "normal_"),
    torch.int32: ("random_", "random_ without bounds", "bernoulli_", "geometric_", "randint_like"),
    torch.bool: ("random_ without bounds", "bernoulli_"),
    torch.uint8: ("random_ without bounds",),
}


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
        few = "dropout" in self.name or "bernoulli" in self.name or self.dtype is torch.bool
        return 64 if few else 16

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
    found += [Way(name, (65,), dtype) for name in _OF_DTYPES for dtype in dtypes]
    others = subject.supported(*_OF_OTHERS)
    return found + [Way(name, (65,), dtype) for dtype in others for name in _OF_OTHERS[dtype]]


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
