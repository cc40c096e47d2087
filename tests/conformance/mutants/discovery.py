"""Faults of discovery."""

from __future__ import annotations

import os
import time
from typing import Any, ClassVar

import torch

from anydevice.backend import Capabilities, MemoryInfo
from mutants.gallery import Fault, mutant, patched
from mutants.moving import Move


@mutant("DEV-001")
class ServedByTorch(Fault):
    """No plugin claims the type: the registry serves it with torch's default."""

    record_changes: ClassVar[dict[str, Any]] = {"entry_point": "torch", "distribution": "torch"}


@mutant("DEV-001")
class NoPackage(Fault):
    """The entry point belongs to no installed package."""

    record_changes: ClassVar[dict[str, Any]] = {"distribution": "unknown", "version": ""}


@mutant("DEV-002")
class PriorityIsText(Fault):
    """`priority` is a string."""

    priority = "high"  # type: ignore[assignment]


@mutant("DEV-002")
class PriorityOfTheHost(Fault):
    """An accelerator has the host's priority."""

    priority = 0


@mutant("DEV-002")
class CapabilitiesAreInts(Fault):
    """A capability is 1 instead of True."""

    capabilities = Capabilities(caching_allocator=True, streams=1)  # type: ignore[arg-type]


@mutant("DEV-002")
class CollectivesWithoutName(Fault):
    """Collectives are claimed, and neither the backend nor torch names any."""

    capabilities = Capabilities(caching_allocator=True, collectives=True)
    collective_backend = None

    def patches(self) -> list[Any]:
        def without(known: Any) -> Any:
            return {kind: name for kind, name in known.items() if kind != "sim"}

        return [patched(torch.distributed.Backend, "default_device_backend_map", without)]


@mutant("DEV-002")
class CollectiveNameWithoutClaim(Fault):
    """A backend of torch.distributed is named, and collectives are not claimed."""

    capabilities = Capabilities(caching_allocator=True)
    collective_backend = "gloo"


@mutant("DEV-002")
class EmptyVariable(Fault):
    """`visible_devices_env` is an empty string."""

    visible_devices_env = ""


@mutant("DEV-003")
class AvailableIsACount(Fault):
    """`is_available` returns the number of devices."""

    def is_available(self) -> bool:
        return self.device_count()  # type: ignore[return-value]


@mutant("DEV-003")
class AvailableRaises(Fault):
    """`is_available` raises what the driver raised."""

    def is_available(self) -> bool:
        raise OSError("libfoo.so.1: cannot open shared object file")


@mutant("DEV-003")
class AvailableContradicts(Fault):
    """`is_available` is False beside two devices."""

    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(self.module.device_count())


@mutant("DEV-004")
class CountsOneTooMany(Fault):
    """`device_count` counts a device that cannot be used."""

    def device_count(self) -> int:
        return super().device_count() + 1


@mutant("DEV-004")
class CountChanges(Fault):
    """`device_count` counts fewer devices at each second call."""

    calls = 0

    def device_count(self) -> int:
        self.calls += 1
        return super().device_count() - self.calls % 2


class _Runtime(Move):
    """A runtime that cannot be used in a child that was forked after it started."""

    started_in: int | None = None

    def start(self) -> None:
        """Start the runtime, in the process that calls first."""
        self.started_in = self.started_in or os.getpid()

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if self.started_in not in (None, os.getpid()):
            raise RuntimeError("cannot re-initialise the runtime in a forked process")
        return tensor


@mutant("DEV-005")
class CountStartsRuntime(_Runtime):
    """`device_count` starts the runtime, so that a forked child cannot use it."""

    def device_count(self) -> int:
        self.start()
        return super().device_count()


@mutant("DEV-005")
class AvailableStartsRuntime(_Runtime):
    """`is_available` starts the runtime."""

    def is_available(self) -> bool:
        self.start()
        return super().is_available()


@mutant("DEV-005")
class DeadAfterFork(Fault):
    """A forked child dies when it touches the device."""

    pid: int | None = None

    def device_count(self) -> int:
        self.pid = self.pid or os.getpid()
        if self.pid != os.getpid():
            os._exit(139)
        return super().device_count()


@mutant("DEV-005")
class CountMakesATensor(Fault):
    """`device_count` tries each device by making a tensor, which a fork happens to survive."""

    def device_count(self) -> int:
        count = super().device_count()
        for index in range(count):
            torch.zeros(8, device=torch.device(self.device_type, index))
        return count


@mutant("DEV-006")
class ImportStartsRuntime(_Runtime):
    """Making the backend object, when the plugin is imported, starts the runtime."""

    def __init__(self) -> None:
        self.start()


@mutant("DEV-007")
class NoName(Fault):
    """`device_name` is empty."""

    def device_name(self, index: int) -> str:
        return ""


@mutant("DEV-007")
class NameIsNone(Fault):
    """`device_name` returns None for all but the first device."""

    def device_name(self, index: int) -> str:
        return super().device_name(index) if index == 0 else None  # type: ignore[return-value]


@mutant("DEV-007")
class NameOfTwoLines(Fault):
    """`device_name` returns the driver's whole output."""

    def device_name(self, index: int) -> str:
        return f"{super().device_name(index)}\nserial 0001"


@mutant("DEV-008")
class VariableHidesNothing(Fault):
    """`visible_devices_env` names a variable that the driver does not read."""

    visible_devices_env = "SIM_VISIBLE_DEVICES"


@mutant("DEV-009")
class MemoryInfoSetsDevice(Fault):
    """`memory_info` makes its device the current one."""

    def memory_info(self, index: int) -> MemoryInfo:
        self.module.set_device(index)
        return super().memory_info(index)


@mutant("DEV-009")
class SynchronizeSetsDevice(Fault):
    """`synchronize` makes its device the current one."""

    def synchronize(self, index: int) -> None:
        self.module.set_device(index)
        super().synchronize(index)


@mutant("DEV-009")
class MoveSetsDevice(Move):
    """`move` makes the target the current device."""

    def before(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.index is not None and device.type == self.device_type:
            self.module.set_device(device.index)
        return tensor


@mutant("DEV-009")
class SeedSetsDevice(Fault):
    """`manual_seed_all` goes through the devices and stays on the last one."""

    def manual_seed_all(self, seed: int) -> None:
        super().manual_seed_all(seed)
        self.module.set_device(self.device_count() - 1)


@mutant("DEV-009")
class StreamSetsDevice(Fault):
    """`new_stream` makes its device the current one."""

    def new_stream(self, index: int) -> Any:
        self.module.set_device(index)
        return super().new_stream(index)


@mutant("DEV-010")
class NameIsNotReentrant(Fault):
    """`device_name` uses one buffer for all threads."""

    busy = False

    def device_name(self, index: int) -> str:
        if self.busy:
            raise RuntimeError("handle is in use")
        self.busy = True
        time.sleep(0.0005)
        self.busy = False
        return super().device_name(index)


@mutant("DEV-010")
class MemoryOfAnotherThread(Fault):
    """`memory_info` keeps its index in the object, where another thread changes it."""

    index = 0

    def memory_info(self, index: int) -> MemoryInfo:
        self.index = index
        time.sleep(0.0005)
        return super().memory_info(self.index)


@mutant("DEV-011")
class RaisesWithoutDriver(Fault):
    """`device_count` raises where all devices are hidden."""

    visible_devices_env = "SIM_VISIBLE_DEVICES"

    def device_count(self) -> int:
        if os.environ.get("SIM_VISIBLE_DEVICES") == "-1":
            raise RuntimeError("no device found")
        return super().device_count()


@mutant("DEV-011")
class CountsHiddenDevices(Fault):
    """Devices that are hidden are counted."""

    visible_devices_env = "SIM_VISIBLE_DEVICES"
