"""Faults of random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mutants.gallery import Fault, mutant, patched


@mutant("RNG-001")
class SeedDoesNothing(Fault):
    """`manual_seed_all` seeds nothing."""

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing."""


@mutant("RNG-001")
class SeedsTheFirst(Fault):
    """`manual_seed_all` seeds device 0 only."""

    def manual_seed_all(self, seed: int) -> None:
        with self.module.device(0):
            self.module.manual_seed(seed)


@mutant("RNG-002")
class SeedIsIgnored(Fault):
    """Every seed is seed 0."""

    def manual_seed_all(self, seed: int) -> None:
        super().manual_seed_all(0)


@mutant("RNG-002")
class SeedIsCut(Fault):
    """Only sixteen bits of the seed count."""

    def manual_seed_all(self, seed: int) -> None:
        super().manual_seed_all(seed & 0xFFFF)


@mutant("RNG-003")
class StateIsWide(Fault):
    """The state is int64."""

    def rng_state(self, index: int) -> torch.Tensor:
        return super().rng_state(index).long()

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        super().set_rng_state(state.to(torch.uint8), index)


@mutant("RNG-003")
class StateIsNotSet(Fault):
    """`set_rng_state` does nothing."""

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        """Do nothing."""


@mutant("RNG-003")
class StateIsTheSeed(Fault):
    """The state holds the seed, and not how far the generator has gone."""

    seed = 0

    def manual_seed_all(self, seed: int) -> None:
        self.seed = seed
        super().manual_seed_all(seed)

    def rng_state(self, index: int) -> torch.Tensor:
        return torch.tensor(list(self.seed.to_bytes(8, "little")), dtype=torch.uint8)

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        super().manual_seed_all(int.from_bytes(bytes(state.tolist()), "little"))


@mutant("RNG-003")
class StateIsOnTheDevice(Fault):
    """The state is a tensor of the device."""

    def rng_state(self, index: int) -> torch.Tensor:
        return super().rng_state(index).to(self.device(index))

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        super().set_rng_state(state.cpu(), index)


@mutant("RNG-004")
class StateOfTheFirst(Fault):
    """`rng_state` is that of device 0."""

    def rng_state(self, index: int) -> torch.Tensor:
        return super().rng_state(0)


@mutant("RNG-004")
class StateIsSetOnAll(Fault):
    """`set_rng_state` sets every device."""

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        for each in range(self.device_count()):
            super().set_rng_state(state, each)


@mutant("RNG-005")
class SeedsTheHost(Fault):
    """`manual_seed_all` seeds the host, too."""

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        super().manual_seed_all(seed)


class _Drawn(Fault):
    """Changes what torch draws on the device."""

    function = "rand"

    def drawn(self, values: torch.Tensor) -> torch.Tensor:
        """Change the numbers."""
        raise NotImplementedError

    def patches(self) -> list[Any]:
        def change(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
                values = real(*args, **kwargs)
                return self.drawn(values) if values.device.type == self.device_type else values

            return draw

        return [patched(torch, self.function, change)]


@mutant("RNG-006")
class HalfTheRange(_Drawn):
    """`rand` is in [0, 0.5)."""

    def drawn(self, values: torch.Tensor) -> torch.Tensor:
        return values / 2


@mutant("RNG-006")
class OneIncluded(_Drawn):
    """`rand` gives 1, which it must not."""

    def drawn(self, values: torch.Tensor) -> torch.Tensor:
        return torch.where(values > 0.9999, torch.ones_like(values), values)


@mutant("RNG-006")
class NormalIsNarrow(_Drawn):
    """`randn` has the deviation 0.9."""

    function = "randn"

    def drawn(self, values: torch.Tensor) -> torch.Tensor:
        return values * 0.9
