"""Usual operators where kernels forget a case: one element, ties, large values, caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from anydevice_conformance.dice import Dice
from anydevice_conformance.usual_operator import (
    ALL,
    NUMBERS,
    WIDE_FLOATS,
    numbers,
    of_shapes,
    of_sizes,
    usual,
)

__all__ = ["RARER"]

_SIZES: Final = of_sizes((1,), (7,), (3, 5), (1, 1), (33,))


def _large(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Whose squares are above float16's largest number, or nearly so."""
    return [numbers(dice, dtype, 3, dice.among(5, 33), low=-400, high=400)]


def _ties(dice: Dice, dtype: torch.dtype) -> list[Any]:
    return [numbers(dice, dtype, dice.among(33, 2501), low=0, high=4).round()]


def _square(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Well conditioned and symmetric, some in a batch."""
    side = dice.among(2, 5, 9)
    values = numbers(dice, torch.float64, *dice.among((3,), (), (2, 2)), side, side, low=-1, high=1)
    return [(values @ values.mT / side + 2 * torch.eye(side, dtype=torch.float64)).to(dtype)]


def _cache(dice: Dice, dtype: torch.dtype) -> list[Any]:
    """Keys of a cache, where new ones are put, and those."""
    count = dice.among(1, 3)
    place = torch.randperm(70, generator=dice.generator)[:count]
    return [numbers(dice, dtype, 2, 70, 4), place, numbers(dice, dtype, 2, count, 4)]


def _row_mask(dice: Dice, dtype: torch.dtype) -> list[Any]:
    mask = torch.rand(5, 1, generator=dice.generator) > 0.4
    return [numbers(dice, dtype, 5, 7), mask, numbers(dice, dtype, 5, 7)]


def _steps(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[..., Any]:
    """Three steps of an optimizer of two weights, whose gradients and rate grow smaller."""

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        weights = [t.detach().clone().requires_grad_() for t in (x, y)]
        optimizer = kind(weights, lr=0.1, **options)
        for scale in (1.0, -0.5, 0.1):
            for weight in weights:
                weight.grad = (weight.detach() * scale + 0.1).detach()
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.6
        return [weight.detach() for weight in weights]

    return run


def _optimizer(name: str, **options: Any) -> Any:
    run = _steps(getattr(torch.optim, name), **options)
    words = ", ".join(f"{key}={value}" for key, value in options.items())
    return usual(f"{name}({words})", of_shapes((3, 5), (33,)), run, *WIDE_FLOATS, trained=False)


def _alone(x: torch.Tensor) -> Any:
    """Copies share no memory: what is written into them leaves the rest alone."""
    copies = [x.clone(), x.contiguous().clone(), x.to(x.dtype, copy=True), x + 0]
    for copy in copies:
        copy.zero_()
    return x, copies


def _of_a_range(x: torch.Tensor) -> Any:
    long = torch.arange(1 << 40, (1 << 40) + 7, device=x.device)
    return long, torch.arange(7, 0, -2, device=x.device), torch.arange(0, 1, 0.3, device=x.device)


def _made(x: torch.Tensor) -> Any:
    size = (*x.shape, 3)
    there: Any = {"dtype": x.dtype, "device": x.device}
    found = [torch.zeros(size, **there), torch.ones(size, **there), torch.full(size, 1, **there)]
    return [*found, torch.eye(3, 5, **there), torch.empty(size, **there).fill_(1).zero_()]


def _copied(x: torch.Tensor) -> Any:
    """What is broadcast as it is copied."""
    into = torch.zeros(3, *x.shape, dtype=x.dtype, device=x.device)
    wide = torch.zeros(3, *x.shape, dtype=torch.float32, device=x.device)
    return into.copy_(x), wide.copy_(x), wide.copy_(x.float()[:1]), into.copy_(wide)


#: All of them.
RARER: Final = (
    usual("copies", _SIZES, _alone, *ALL, trained=False),
    usual("zero_", _SIZES, lambda x: x * 0, *NUMBERS, inplace_variant=lambda x: x.zero_()),
    usual("fill_ in place", _SIZES, lambda x: x, *ALL, inplace_variant=lambda x: x.fill_(1)),
    usual("factories", _SIZES, _made, *ALL, trained=False),
    usual("copies that are broadcast", _SIZES, _copied, *NUMBERS, trained=False),
    usual("arange", _SIZES, _of_a_range, torch.float32, trained=False),
    usual("norms of large values", _large, lambda x: (x.norm(dim=-1), torch.linalg.vector_norm(x))),
    usual("mean of large values", _large, lambda x: (x.mean(-1), x.logsumexp(-1), x.softmax(-1))),
    usual(
        "stable sort",
        _ties,
        lambda x: x.sort(stable=True),
        *NUMBERS[:6],
    ),
    usual(
        "stable sort downwards",
        _ties,
        lambda x: x.sort(stable=True, descending=True),
        *NUMBERS[:6],
    ),
    usual(
        "index_copy of a cache",
        _cache,
        lambda x, i, v: x.index_copy(1, i, v),
        *NUMBERS,
        inplace_variant=lambda x, i, v: x.index_copy_(1, i, v),
    ),
    usual("index_put of a cache", _cache, lambda x, i, v: x.index_put((_rows(x), i), v), *NUMBERS),
    usual("masked_scatter of rows", _row_mask, lambda x, m, y: x.masked_scatter(m, y), *ALL),
    usual("masked_fill of rows", _row_mask, lambda x, m, y: x.masked_fill(m, 1), *ALL),
    usual("where of rows", _row_mask, lambda x, m, y: torch.where(m, x, y[:1]), *ALL),
    usual("overlapping windows", of_shapes((3, 9)), lambda x: x.unfold(-1, 4, 1) * 2),
    usual(
        "max_pool2d to the edge",
        lambda dice, dtype: [torch.randperm(126, generator=dice.generator).view(2, 7, 9).to(dtype)],
        lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True, return_indices=True),
    ),
    usual("cholesky", _square, lambda x: torch.linalg.cholesky(x), *WIDE_FLOATS),
    usual("cholesky above", _square, lambda x: torch.linalg.cholesky(x, upper=True), *WIDE_FLOATS),
    usual("solve", _square, lambda x: torch.linalg.solve(x, x[..., :1] + 1), *WIDE_FLOATS),
    usual("inverse and determinant", _square, lambda x: (x.inverse(), x.det()), *WIDE_FLOATS),
    usual("eigenvalues", _square, lambda x: torch.linalg.eigvalsh(x), *WIDE_FLOATS, trained=False),
    usual(
        "singular values", _square, lambda x: torch.linalg.svdvals(x), *WIDE_FLOATS, trained=False
    ),
    _optimizer("SGD", momentum=0.9, weight_decay=0.1, foreach=True),
    _optimizer("SGD", momentum=0.9, nesterov=True, fused=True),
    _optimizer("Adam", amsgrad=True, betas=(0.5, 0.3), foreach=True),
    _optimizer("Adam", weight_decay=0.1, fused=True),
    _optimizer("AdamW", amsgrad=True, betas=(0.5, 0.3), fused=True),
    _optimizer("AdamW", maximize=True, foreach=False),
    _optimizer("RMSprop", momentum=0.5, foreach=True),
    _optimizer("Adagrad"),
)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0], device=x.device)[:, None]
