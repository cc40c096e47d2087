"""How much memory each device may give: measured, or said by the user."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from anydevice import registry
from anydevice.backend import DeviceBackend, MemoryInfo
from anydevice.devices import CPU, DISK, META, Device, parse_device, same_devices
from anydevice.errors import BackendError, BudgetError, UnknownDeviceError
from anydevice.text import SMALLEST_COMPUTED, as_float, read_bytes

__all__ = ["Budget", "Headroom", "check_budgets", "get_max_memory", "read_budgets"]

#: Bytes (``2**30``, ``"2GiB"``), a share of the budget (``0.1``), or either for each device.
Headroom: TypeAlias = "int | float | str | Mapping[Any, int | float | str] | None"
#: The share of a *measured* budget that is left to activations unless the caller says otherwise.
DEFAULT_HEADROOM: Final = 0.1


@dataclasses.dataclass(frozen=True)
class Budget:
    """What one device may hold.

    Attributes:
        key: the device as the user spells it: an int or a string.
        device: the device.
        size: bytes for weights, headroom taken off; None means no limit.
    """

    key: int | str
    device: Device
    size: int | None


# ---------------------------------------------------------------------- from the machine


def get_max_memory(max_memory: Mapping[Any, int | str] | None = None) -> dict[int | str, int]:
    """The bytes that each device can give.

    Args:
        max_memory: budgets by device, in any spelling of devices and sizes. By default every device
            of this machine is measured.

    Returns:
        Bytes by device, fastest first, the host after the accelerators. Measured devices of the
        first accelerator type have their index as key, others ``"type:index"``. Where accelerators
        share the host's memory, it is counted once: what they are given, the host is not.

    Raises:
        BudgetError: a size cannot be read, or a device does not say how much memory it has.
        UnknownDeviceError: a device cannot be read, or is named twice.

    Example:
        >>> from anydevice.utils import get_max_memory
        >>> get_max_memory({"cpu": "1KiB"})
        {'cpu': 1024}
    """
    budgets = _measured() if max_memory is None else _given(max_memory)
    return {b.key: b.size for b in budgets if b.size is not None}


def _measured() -> list[Budget]:
    devices = [parse_device(device) for device in registry.available_devices()]
    memory = {device: _measure(device) for device in devices}
    host = memory[CPU].free
    budgets = []
    for device in devices:
        size = memory[device].free
        if device == CPU:
            size = host
        elif _is_hosts(device, memory[device]):
            size = min(size, host)
            host -= size
        budgets.append(Budget(_key_here(device), device, size))
    return budgets


def _is_hosts(device: Device, memory: MemoryInfo) -> bool:
    """Whether a device's memory is the host's; devices of one type may differ."""
    if memory.shared_with_host is not None:
        return memory.shared_with_host
    return registry.get_backend(device.type).capabilities.unified_memory


def _measure(device: Device) -> MemoryInfo:
    try:
        return registry.measure_memory(str(device))
    except Exception as error:  # a vendor's query can fail in any way
        raise BudgetError(
            f"{device} does not say how much memory it has ({type(error).__name__}: {error}). "
            f"Give budgets, such as max_memory={{{_key_here(device)!r}: '8GiB', 'cpu': '16GiB'}}, "
            f"or leave it out with ANYDEVICE_BACKENDS=-{device.type}."
        ) from error


def _key_here(device: Device) -> int | str:
    """An accelerator of the first type goes by its index, as in the reference."""
    if device.index is not None and device.type == registry.primary_type():
        return device.index
    return str(device)


# ---------------------------------------------------------------------- from the user


def read_budgets(
    max_memory: Mapping[Any, int | str] | None,
    headroom: Headroom = None,
    disk: bool | int | str = True,
) -> list[Budget]:
    """The budgets to plan with: accelerators, fastest first; the host; the disk, if allowed.

    Args:
        max_memory: as for `get_max_memory`. ``"disk"`` may be among them.
        headroom: what to leave free on accelerators. None leaves a tenth of what was measured
            (of the host's too), and nothing of what the user gave.
        disk: False forbids it; a size caps it, as ``max_memory["disk"]`` does.

    Raises:
        BudgetError: as `get_max_memory`; headroom or disk cannot be read; or every device but the
            disk has 0.
        UnknownDeviceError: as `get_max_memory`; or headroom names a device wrongly, or twice.
    """
    given = max_memory is not None
    budgets = _given(max_memory) if max_memory is not None else _measured()
    cap = _disk_cap(budgets, disk)
    shares = _shares(headroom, given, [b.device for b in budgets])
    before = [b for b in budgets if b.device != DISK]
    weights = [_leave(b, shares.get(b.device, 0)) for b in before]
    if not any(budget.size for budget in weights):
        said = {b.key: b.size for b in budgets} or "it names no device"
        if any(budget.size for budget in before):
            raise BudgetError(
                f"headroom={headroom!r} leaves 0 bytes everywhere of {said}: lower it"
            )
        raise BudgetError(f"max_memory gives 0 bytes everywhere: {said}. Give some device memory.")
    return [*weights, *cap]


def check_budgets(
    max_memory: Mapping[Any, int | str] | None,
    headroom: Headroom = None,
    disk: bool | int | str = True,
) -> None:
    """Make sure that budgets can be read, long before they are needed. Nothing is measured.

    Raises:
        BudgetError, UnknownDeviceError: as `read_budgets`.
    """
    if max_memory is not None:
        _given(max_memory)
    _shares(headroom, True, ())
    _disk_cap([], disk)


def _given(max_memory: Mapping[Any, int | str]) -> list[Budget]:
    """Read budgets, in order of speed."""
    if not isinstance(max_memory, Mapping):
        raise BudgetError(f"max_memory is {max_memory!r}; it must be a dict of device to size")
    budgets: dict[Device, Budget] = {}
    for key, size in max_memory.items():
        device = parse_device(key)
        if device == META:
            raise BudgetError("max_memory names 'meta', which holds no weights")
        if device in budgets:
            raise BudgetError(
                f"max_memory names {device} twice, as {budgets[device].key!r} and as {key!r}"
            )
        number = read_bytes(size, f"max_memory[{key!r}]")
        spelling = int(key) if isinstance(key, numbers.Integral) else str(key)
        budgets[device] = Budget(spelling, device, number)
    kinds = list(dict.fromkeys(device.type for device in budgets))
    speed = {kind: (Device(kind).tier, -_priority(kind), i) for i, kind in enumerate(kinds)}
    return sorted(budgets.values(), key=lambda b: (speed[b.device.type], b.device.index or 0))


def _priority(kind: str) -> int:
    """A backend's priority, also where its devices are on another machine."""
    try:
        return registry.get_backend(kind).priority
    except (BackendError, UnknownDeviceError):
        return DeviceBackend.priority


def _disk_cap(budgets: list[Budget], disk: bool | int | str) -> list[Budget]:
    said = next((b for b in budgets if b.device == DISK), None)
    if disk is False:
        return []
    if disk is not True:
        cap = read_bytes(disk, "disk (True, False, or a size)")
        if said is not None and said.size is not None:
            cap = min(cap, said.size)
        return [Budget(DISK.type, DISK, cap)]
    return [said or Budget(DISK.type, DISK, None)]


def _shares(
    headroom: Headroom, given: bool, devices: Sequence[Device]
) -> dict[Device, int | float]:
    """What is taken off the budget of each device: bytes, or a share below 1."""
    if headroom is None:
        return dict.fromkeys(devices, 0 if given else DEFAULT_HEADROOM)
    if isinstance(headroom, Mapping):
        amounts = {key: _amount(value, f"headroom[{key!r}]") for key, value in headroom.items()}
        return same_devices(amounts, "headroom")
    amount = _amount(headroom, "headroom")
    return {device: amount for device in devices if device.is_accelerator}


def _amount(value: Any, where: str) -> int | float:
    number = as_float(value)
    if number is not None and 0 <= number < 1:
        return number
    if number is not None and not number >= SMALLEST_COMPUTED:
        raise BudgetError(
            f"{where}: {value!r} is neither a share, from 0 to below 1, such as 0.1; nor a size, "
            "such as 2**30 or '1GiB'"
        )
    return read_bytes(value, where)


def _leave(budget: Budget, share: int | float) -> Budget:
    """Take the headroom off one budget."""
    size = budget.size or 0
    left = share if isinstance(share, int) else int(size * share)
    return dataclasses.replace(budget, size=max(0, size - left))
