"""Random numbers of the simulated device, as torch's device modules have them."""

from __future__ import annotations

import torch

from .bound import DeviceName, index_of, native

__all__ = [
    "get_rng_state",
    "get_rng_state_all",
    "initial_seed",
    "manual_seed",
    "manual_seed_all",
    "seed",
    "seed_all",
    "set_rng_state",
    "set_rng_state_all",
]


def _generator(device: DeviceName = None) -> torch.Generator:
    return native().default_generator(index_of(device))


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(native().device_count()):
        _generator(index).manual_seed(int(seed))


def seed() -> None:
    """Seed the current device's generator from the system."""
    _generator().seed()


def seed_all() -> None:
    """Seed the generators of all devices with one number from the system."""
    manual_seed_all(_generator().seed())


def initial_seed() -> int:
    """The seed of the current device's generator."""
    return _generator().initial_seed()


def get_rng_state(device: DeviceName = None) -> torch.Tensor:
    """The state of a device's generator: a uint8 tensor on the host."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceName = None) -> None:
    """Put back what `get_rng_state` gave."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(index) for index in range(native().device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Put back what `get_rng_state_all` gave."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)
