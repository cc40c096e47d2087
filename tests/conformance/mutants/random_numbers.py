"""Faults of random numbers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from mutants.gallery import Fault, mutant, patched
from mutants.kernels import Kernel


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


@mutant("RNG-003")
class BlocksAreNotRepeated(Fault):
    """`torch.utils.checkpoint` is told that the device was never used, and keeps no state of it."""

    def patches(self) -> list[Any]:
        return [mock.patch.object(self.module, "_initialized", False)]


@mutant("RNG-004")
class DrawsMoveAll(Kernel):
    """A draw on one device moves the other one's generator, too."""

    operations = ("uniform_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for index in range(self.device_count()):
            if index != args[0].device.index and kwargs.get("generator") is None:
                real(torch.empty(4, device=self.device(index)))
        return real(*args, **kwargs)


@mutant("RNG-006")
class LongPermutations(Kernel):
    """Behind 65,536 numbers a permutation goes on in order."""

    operations = ("randperm.generator_out", "randperm", "randperm.generator")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        found[1 << 16 :] = torch.arange(found.numel(), device=found.device)[1 << 16 :]
        return found


@mutant("RNG-007")
class GeneratorIsNotUsed(Kernel):
    """Normal numbers are the default generator's, whichever is given."""

    operations = ("normal_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(*args, **{**kwargs, "generator": None})


@mutant("RNG-007")
class ThreadsDrawForThemselves(Kernel):
    """In a thread dropout draws from a generator that no seed reaches."""

    operations = ("native_dropout",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return real(*args, **kwargs)
        before = self.rng_state(args[0].device.index)
        with self.module.device(args[0].device.index):
            self.module.seed()
        found = real(*args, **kwargs)
        self.set_rng_state(before, args[0].device.index)
        return found


@mutant("RNG-006")
class ProbabilitiesOfEightBits(Kernel):
    """`bernoulli_` rounds its probability down to 8 bits."""

    operations = ("bernoulli_.float",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        share = args[1] if len(args) > 1 else kwargs.pop("p", 0.5)
        return real(args[0], int(share * 256) / 256, **kwargs)


@mutant("RNG-006")
class SmallNumbersAreZero(Kernel):
    """`exponential_` gives 0 for what is small."""

    operations = ("exponential_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn = real(*args, **kwargs)
        return drawn.masked_fill_(drawn < 2**-11, 0)


@mutant("RNG-006")
class NormalsEndAtThree(Kernel):
    """`normal_` gives nothing beyond three deviations."""

    operations = ("normal_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn, mean, deviation = real(*args, **kwargs), *(*args[1:], 0.0, 1.0)[:2]
        return drawn.clamp_(mean - 3 * deviation, mean + 3 * deviation)


@mutant("RNG-006", check="test_RNG_006_rare_numbers")
class NormalsEndAtFour(Kernel):
    """`normal_` makes its numbers of 12 bits: none is further than 4.08 deviations."""

    operations = ("normal_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn, mean, deviation = real(*args, **kwargs), *(*args[1:], 0.0, 1.0)[:2]
        if drawn.is_complex():
            return drawn
        return drawn.clamp_(mean - 4.08 * deviation, mean + 4.08 * deviation)


@mutant("RNG-006", check="test_RNG_006_distributions")
class DeviationsAreVariances(Kernel):
    """`torch.normal` takes a tensor of deviations for variances."""

    operations = ("normal.Tensor_Tensor", "normal.float_Tensor")

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return real(args[0], args[1].sqrt(), **kwargs)


@mutant("RNG-003", check="test_RNG_003_forked")
class ForksKeepTheCurrent(Fault):
    """The device's module gives the current device's state where another one is named."""

    def patches(self) -> list[Any]:
        def current(real: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
            return lambda device=None: real(device if isinstance(device, torch.device) else None)

        return [patched(self.module, "get_rng_state", current)]


@mutant("RNG-007", check="test_RNG_007_every_way_to_draw")
class ThreadsHaveOtherNumbers(Kernel):
    """In a thread the numbers come the other way round: other ones than elsewhere after a seed."""

    operations = ("normal_",)

    def changed(self, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        drawn = real(*args, **kwargs)
        if threading.current_thread() is threading.main_thread() or drawn.dim() != 1:
            return drawn
        return drawn.copy_(drawn.flip(0))
