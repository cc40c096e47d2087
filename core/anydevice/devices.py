"""One way to spell a device: ``0``, ``"0"``, ``"foo:0"``, ``torch.device("foo", 0)`` are the same.

A device here is plain data (`Device`), since ``torch.device("foo")`` raises until its vendor's
package is loaded, and since a plan may be made for a machine that is not this one.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeAlias, TypeVar

import torch

from anydevice import registry
from anydevice.backend import torchs_accelerator
from anydevice.errors import UnknownDeviceError

__all__ = [
    "CPU",
    "DISK",
    "META",
    "Device",
    "DeviceLike",
    "parse_device",
    "resolve_device",
    "same_devices",
    "synchronize",
]

#: Any spelling of a device.
DeviceLike: TypeAlias = "int | str | torch.device | Device"
V = TypeVar("V")

#: The type of a bare index on a machine without an accelerator: good for a plan, not for work.
_UNKNOWN_ACCELERATOR: Final = "accelerator"


@dataclasses.dataclass(frozen=True)
class Device:
    """A device, or ``disk``. Equal when it is the same place, however it was spelled.

    Attributes:
        type: a torch device type, ``"disk"`` or ``"meta"``.
        index: from 0; None for the host, the disk and meta.
    """

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"

    @property
    def is_accelerator(self) -> bool:
        """Whether it is neither the host, nor the disk, nor meta."""
        return self.type not in _PLACELESS

    @property
    def tier(self) -> int:
        """How fast it is by its kind: 0 for accelerators, 1 for the host, 2 for all else."""
        return 0 if self.is_accelerator else 1 if self == CPU else 2

    @property
    def torch(self) -> torch.device:
        """As a `torch.device`; the disk's weights are seen from the host, so it gives that."""
        return _torch_device(CPU.type if self == DISK else str(self))


CPU: Final = Device("cpu")
DISK: Final = Device("disk")
META: Final = Device("meta")
_PLACELESS: Final = frozenset({CPU.type, DISK.type, META.type})


def parse_device(spelling: DeviceLike) -> Device:
    """Read any spelling of a device. It need not be on this machine.

    Args:
        spelling: an index (of this machine's first accelerator type), ``"0"``, ``"foo"`` (its
            device 0), ``"foo:1"``, a `torch.device`, ``"cpu"``, ``"disk"`` or ``"meta"``.

    Raises:
        UnknownDeviceError: it is none of those, or no plugin and not torch knows the type.
    """
    if isinstance(spelling, (Device, torch.device)):
        return _make(spelling.type, spelling.index)
    if _is_integer(spelling):
        return _from_index(int(spelling))
    if not isinstance(spelling, str):
        raise UnknownDeviceError(
            f"{spelling!r} ({type(spelling).__name__}) is not a device. Use an index, a string "
            "such as 'cpu', 'disk' or 'foo:0', or a torch.device."
        )
    text = spelling.strip()
    if text.isdecimal():
        return _from_index(int(text))
    kind, colon, index = text.partition(":")
    if colon and not index.isdecimal():
        raise UnknownDeviceError(f"{spelling!r} is not a device: after ':' comes an index")
    if kind not in _PLACELESS and not _is_known(kind):
        raise UnknownDeviceError(
            f"{spelling!r} is not a device that anydevice knows. Known types: 'disk', "
            f"{', '.join(repr(t) for t in sorted(registry.known_types()))}. "
            "`anydevice backends` lists every plugin found."
        )
    return _make(kind, int(index) if index else None)


def resolve_device(spelling: DeviceLike) -> Device:
    """Read any spelling of a device, and make sure that this machine has it.

    Raises:
        UnknownDeviceError: it cannot be read, or is not here; the message lists what is.
    """
    device = parse_device(spelling)
    if device.is_accelerator:
        here = [str(d) for d in registry.available_devices()]
        if str(device) not in here:
            missing = f"device {str(device)!r} is not on this machine"
            if device.type == _UNKNOWN_ACCELERATOR:
                missing = f"there is no device {device.index}: this machine has no accelerator"
            raise UnknownDeviceError(f"{missing}; available: {', '.join(here)}, disk")
    return device


def same_devices(mapping: Mapping[Any, V], what: str) -> dict[Device, V]:
    """Read a mapping's keys as devices.

    Raises:
        UnknownDeviceError: a key cannot be read, or two keys are the same device.
    """
    result: dict[Device, V] = {}
    for key, value in mapping.items():
        device = parse_device(key)
        if device in result:
            raise UnknownDeviceError(f"{what} names {device} twice; the second time as {key!r}")
        result[device] = value
    return result


def synchronize(devices: Iterable[DeviceLike]) -> None:
    """Wait for all that is queued on those of some devices that are accelerators."""
    for device in dict.fromkeys(map(parse_device, devices)):
        if device.is_accelerator and device.index is not None:
            registry.get_backend(device.type).synchronize(device.index)


def _is_integer(value: Any) -> bool:
    """Python's integers and numpy's, but not True and False."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


@functools.cache
def _torch_device(text: str) -> torch.device:
    # Outside of any function mode of the caller's, which could make something else of it.
    with torch._C.DisableTorchFunction():
        return torch.device(text)


def _from_index(index: int) -> Device:
    if index < 0:
        raise UnknownDeviceError(f"{index} is not a device: an index starts at 0")
    return Device(registry.primary_type() or _UNKNOWN_ACCELERATOR, index)


def _make(kind: str, index: int | None) -> Device:
    return Device(kind) if kind in _PLACELESS else Device(kind, index or 0)


def _is_known(kind: str) -> bool:
    if kind == _UNKNOWN_ACCELERATOR or kind in registry.known_types():
        return True
    return torchs_accelerator() == kind
