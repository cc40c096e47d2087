"""Handlers: a user's choices about things of torch that are made on the way."""

from __future__ import annotations

import copy
import dataclasses
import datetime
from dataclasses import dataclass
from typing import Any

from anydevice.arguments import names_unknown_arguments

__all__ = ["AutocastKwargs", "GradScalerKwargs", "InitProcessGroupKwargs", "KwargsHandler"]


class KwargsHandler:
    """Base of the dataclasses whose fields are arguments of something else.

    Example:
        >>> from dataclasses import dataclass
        >>> from anydevice.utils import KwargsHandler
        >>> @dataclass
        ... class Options(KwargsHandler):
        ...     depth: int = 1
        ...     width: int = 2
        >>> Options(width=3).to_kwargs()
        {'width': 3}
    """

    def to_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return copy.deepcopy(vars(self))

    def to_kwargs(self) -> dict[str, Any]:
        """The fields that differ from their defaults, by name."""
        default = type(self)()
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        values = {field.name: getattr(self, field.name) for field in fields}
        return {k: v for k, v in values.items() if v != getattr(default, k)}


@names_unknown_arguments
@dataclass
class AutocastKwargs(KwargsHandler):
    """Arguments of `torch.autocast`.

    Args:
        enabled: False computes in the weights' own precision.
        cache_enabled: keep weights that were converted within one region.

    Example:
        >>> from anydevice import AutocastKwargs
        >>> AutocastKwargs(cache_enabled=False).to_kwargs()
        {'cache_enabled': False}
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@names_unknown_arguments
@dataclass
class GradScalerKwargs(KwargsHandler):
    """Arguments of the loss scaler, a `torch.amp.GradScaler` on most devices.

    Args:
        init_scale: the scale at the start.
        growth_factor: by what it grows after ``growth_interval`` steps without overflow.
        backoff_factor: by what it shrinks with an overflow.
        growth_interval: in steps.
        enabled: False does not scale.

    Example:
        >>> from anydevice import GradScalerKwargs
        >>> GradScalerKwargs(init_scale=1024.0).to_kwargs()
        {'init_scale': 1024.0}
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@names_unknown_arguments
@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """How the process group is formed.

    Args:
        backend: name of the device's collectives; None is what its backend names.
        init_method: where the processes meet; None is the environment's address.
        timeout: how long to wait for other processes; None is 10 minutes.

    Example:
        >>> from datetime import timedelta
        >>> from anydevice import Accelerator, InitProcessGroupKwargs
        >>> waits = InitProcessGroupKwargs(timeout=timedelta(minutes=30))
        >>> Accelerator(cpu=True, kwargs_handlers=[waits]).num_processes
        1
    """

    backend: str | None = None
    init_method: str | None = None
    timeout: datetime.timedelta | None = None
