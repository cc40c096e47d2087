"""Random numbers: seeding everything, and making states equal on all processes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from typing import Final

import torch

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.collectives import broadcast
from anydevice.errors import OptionError
from anydevice.processes import PartialState, RNGType

__all__ = ["set_seed", "synchronize_rng_state", "synchronize_rng_states"]

#: What numpy takes.
_SEEDS: Final = 2**32
_TORCH: Final = str(RNGType.TORCH)
_GENERATOR: Final = str(RNGType.GENERATOR)


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, numpy's, torch's and each device's generator.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: another seed on each process: ``seed`` plus the process's rank.
        deterministic: use deterministic algorithms where there are some, which may be slower.

    Raises:
        OptionError: the seed is no such number.

    Example:
        >>> import torch
        >>> from anydevice.utils import set_seed
        >>> set_seed(0)
        >>> a = torch.rand(2)
        >>> set_seed(0)
        >>> bool((torch.rand(2) == a).all())
        True
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < _SEEDS:
        raise OptionError(f"seed={seed!r}: give an integer from 0 to {_SEEDS - 1}")
    if device_specific:
        seed = (seed + PartialState().process_index) % _SEEDS
    random.seed(seed)
    with contextlib.suppress(ImportError):  # torch works without numpy
        import numpy

        numpy.random.seed(seed)
    torch.manual_seed(seed)
    for backend in _with_generators():
        backend.manual_seed_all(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)


def synchronize_rng_state(
    rng_type: RNGType | str | None = None, generator: torch.Generator | None = None
) -> None:
    """Give every process the random state that process 0 has.

    Args:
        rng_type: ``"torch"`` for the host's generator, ``"generator"`` for the one given, or a
            device type for this process's device. None: the one given.
        generator: a generator of your own, on the host.

    Raises:
        OptionError: ``"generator"`` without one, an unknown type, or a device without generator.
        MissingRankError, CollectiveMismatchError: not all processes make the call.

    Example:
        >>> from anydevice.utils import synchronize_rng_state
        >>> synchronize_rng_state("torch")
    """
    kind = str(_kind(rng_type, generator))
    if kind == _TORCH:
        torch.set_rng_state(broadcast(torch.get_rng_state()))
    elif kind == _GENERATOR:
        assert generator is not None
        generator.set_state(broadcast(generator.get_state()))
    else:
        backend, index = _device_generator(kind)
        backend.set_rng_state(broadcast(backend.rng_state(index)), index)


def synchronize_rng_states(
    rng_types: Iterable[RNGType | str], generator: torch.Generator | None = None
) -> None:
    """Give every process the random states of several kinds that process 0 has.

    Args:
        rng_types: see `synchronize_rng_state`.
        generator: where ``"generator"`` is among them.

    Raises:
        OptionError: see `synchronize_rng_state`; before any state is changed.

    Example:
        >>> from anydevice import synchronize_rng_states
        >>> synchronize_rng_states(["torch"])
    """
    kinds = [_kind(rng_type, generator) for rng_type in rng_types]
    for kind in kinds:
        synchronize_rng_state(kind, generator)


def _kind(rng_type: RNGType | str | None, generator: torch.Generator | None) -> RNGType:
    if rng_type is None:
        rng_type = RNGType.GENERATOR
    try:
        kind = RNGType(rng_type)
    except ValueError:
        raise OptionError(
            f"rng_type={str(rng_type)!r}: use 'torch', 'generator' or a device type"
        ) from None
    if str(kind) == _GENERATOR and generator is None:
        raise OptionError("rng_type='generator': give the generator, too")
    if str(kind) not in (_TORCH, _GENERATOR):
        _device_generator(str(kind))
    return kind


def _device_generator(kind: str) -> tuple[DeviceBackend, int]:
    """The backend and index whose generator a device type means here."""
    backend = registry.get_backend(kind)
    if not backend.capabilities.device_rng or not backend.device_count():
        raise OptionError(f"rng_type={kind!r}: no such device with a generator is here")
    device = PartialState().device
    return backend, (device.index or 0) if device.type == backend.device_type else 0


def _with_generators() -> list[DeviceBackend]:
    """The backends of the accelerators that are here and have generators of their own."""
    return [
        record.backend
        for record in registry.list_backends()
        if record.status == "available"
        and record.backend is not None
        and record.backend.capabilities.device_rng
    ]
