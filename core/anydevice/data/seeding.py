"""Random numbers that follow from a seed, whatever the global generators did."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

__all__ = ["epoch_generator", "seeded"]


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """A generator for an epoch: the same for the same seed and epoch."""
    return torch.Generator().manual_seed((seed + epoch) % (1 << 63))


def seeded(batches: Iterable[Any], seed: int) -> Iterator[Any]:
    """Iterate with the global generators seeded, and everyone else's states as they were."""
    generator = getattr(getattr(batches, "sampler", batches), "generator", None)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed % (1 << 63))
    outside = _states()
    _seed_all(seed)
    try:
        iterator = iter(batches)
        inside = _states()
    finally:
        _restore(outside)
    while True:
        outside = _states()
        _restore(inside)
        try:
            batch = next(iterator)
            inside = _states()
        except StopIteration:
            return
        finally:
            _restore(outside)
        yield batch


def _states() -> tuple[Any, Any, Any]:
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy is not None else None
    return torch.get_rng_state(), random.getstate(), drawn


def _restore(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states[2] is not None:
        numpy.random.set_state(states[2])


def _seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(seed % (1 << 63))
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % (1 << 32))
