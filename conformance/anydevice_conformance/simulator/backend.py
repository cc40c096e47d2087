"""The simulator as a backend of anydevice, found by entry point as a vendor's is.

It has no devices until `simulator.install` has been called in the process, or the environment
variable ``ANYDEVICE_SIMULATOR`` asks for it; then the first question installs it.
"""

from __future__ import annotations

import os
import sys
import warnings
from typing import Final

from anydevice.backend import Capabilities, DeviceBackend, hookimpl

from . import collectives

__all__ = ["SimulatorBackend", "anydevice_backends"]


_VARIABLE: Final = "ANYDEVICE_SIMULATOR"


class SimulatorBackend(DeviceBackend):
    """The device ``sim``.

    Under another name the simulator plays a vendor's device, and the backend is the vendor's.
    """

    device_type = "sim"
    interface_version = "1.1"
    collective_backend = collectives.NAME if collectives.is_available() else None

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        """In mode ``"sync"`` no work overlaps, so that neither streams nor pinned memory do."""
        late = _mode() != "sync"
        return Capabilities(
            caching_allocator=True,
            streams=late,
            pinned_memory=late,
            device_rng=True,
            grad_scaling=True,
            collectives=collectives.is_available(),
        )

    def is_available(self) -> bool:
        """Say whether the simulator is installed as ``sim``, installing it if that was asked."""
        fault = self._install()
        if fault:
            warnings.warn(f"{_VARIABLE} is set, but {fault}", stacklevel=2)
        return _installed_name() == self.device_type

    def device_count(self) -> int:
        """How many devices `simulator.configure` made; 0 while it is not installed."""
        return int(self.module.device_count()) if self.is_available() else 0

    def why_unavailable(self) -> str:
        """How to have one."""
        name = _installed_name()
        if name is not None and name != self.device_type:
            return (
                f"the simulator plays {name!r} in this process, and can play one type only: name "
                f"{name!r} instead, or start a process that leaves it out "
                f"(ANYDEVICE_BACKENDS=-{name} {_VARIABLE}=1)"
            )
        return self._install() or f"not started: set {_VARIABLE}=1, or call simulator.configure()"

    def _install(self) -> str:
        """Install what the environment asks for, if it asks; return why it cannot be."""
        if not os.environ.get(_VARIABLE):
            return ""
        from .build import SimulatorUnavailableError
        from .control import install_from_env

        try:
            install_from_env()
        except (SimulatorUnavailableError, ValueError) as error:
            return str(error)
        return ""


def _installed_name() -> str | None:
    """The type that the simulator plays. Nobody installed it whose module was never imported."""
    control = sys.modules.get(f"{__package__}.control")
    return None if control is None else control.installed_name()


def _mode() -> str:
    control = sys.modules.get(f"{__package__}.control")
    return "lazy" if control is None else str(control.mode())


@hookimpl
def anydevice_backends() -> list[DeviceBackend]:
    """Hand the backend to anydevice."""
    return [SimulatorBackend()]
