"""Accelerators for a machine that has none: a torch device in host memory that keeps the rules.

    from anydevice_conformance import simulator

    simulator.configure(devices=2, memory=["64MiB", "1GiB"], mode="lazy")
    x = torch.ones(4, pin_memory=True).to("sim:1", non_blocking=True)

Its memory has a cap, mixing its devices is an error, and its streams run late: code that forgets
to wait reads NaN, in every run. It is compiled on first use (half a minute; kept in the user's
cache), and importing this package neither compiles nor starts anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .build import SimulatorUnavailableError
    from .control import (
        ENVIRONMENT_VARIABLE,
        TraceRecord,
        advance_clock,
        clock_us,
        configure,
        counters,
        drain,
        install,
        install_from_env,
        installed_name,
        is_installed,
        pinned_bytes,
        reset_counters,
        trace,
    )
    from .options import Options

__all__ = [
    "ENVIRONMENT_VARIABLE",
    "Options",
    "SimulatorUnavailableError",
    "TraceRecord",
    "advance_clock",
    "clock_us",
    "configure",
    "counters",
    "drain",
    "install",
    "install_from_env",
    "installed_name",
    "is_installed",
    "pinned_bytes",
    "reset_counters",
    "trace",
]

#: Where each name is defined. Imported when first asked for: every discovery of backends imports
#: this package, and most of them have no use for a simulator.
_HOMES = {"Options": "options", "SimulatorUnavailableError": "build"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES.get(name, 'control')}", __name__), name)
    globals()[name] = value
    return value
