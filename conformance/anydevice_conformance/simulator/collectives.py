"""``torch.distributed`` on simulated devices, by the name ``simccl``.

Bytes travel through gloo; see ``csrc/collectives.cpp`` for how they are ordered with a device's
streams.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

__all__ = ["NAME", "is_available", "register"]

NAME: Final = "simccl"


def is_available() -> bool:
    """Say whether this torch has what carries them."""
    return dist.is_available() and dist.is_gloo_available()


def register(device_type: str) -> None:
    """Make the name known to torch, once, for a device type."""
    if is_available() and not hasattr(dist.Backend, NAME.upper()):
        dist.Backend.register_backend(NAME, _create, devices=device_type)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    from torch.distributed import ProcessGroupGloo

    from . import device_module

    carrier = ProcessGroupGloo(store, rank, size, timeout=timeout)
    return device_module.native().make_collectives(carrier)
