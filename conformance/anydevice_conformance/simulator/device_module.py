"""The module that torch knows as ``torch.sim``: the surface that ``torch.cuda`` has made usual.

`bind` gives it its name and its compiled part; nothing here works before. A ``device`` is an
index, a string, a `torch.device`, or None for the current one. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from .bound import DeviceName, device_type, index_of
from .bound import bind as bind
from .bound import native as native
from .device_random import (
    get_rng_state as get_rng_state,
)
from .device_random import (
    get_rng_state_all as get_rng_state_all,
)
from .device_random import (
    initial_seed as initial_seed,
)
from .device_random import (
    manual_seed as manual_seed,
)
from .device_random import (
    manual_seed_all as manual_seed_all,
)
from .device_random import (
    seed as seed,
)
from .device_random import (
    seed_all as seed_all,
)
from .device_random import (
    set_rng_state as set_rng_state,
)
from .device_random import (
    set_rng_state_all as set_rng_state_all,
)

if TYPE_CHECKING:
    from types import TracebackType

# ---------------------------------------------------------------- devices


def is_available() -> bool:
    """Say whether the device can be used: always, once it is installed."""
    return True


def is_initialized() -> bool:
    """Say whether the runtime has started: it has none that must."""
    return True


def init() -> None:
    """Start nothing; here because torch calls it."""


_lazy_init = init
#: torch.utils.checkpoint asks for it before it keeps the device's generator for the recomputation.
_initialized = True


def _is_in_bad_fork() -> bool:
    return False  # the compiled part repairs itself in a forked child


def device_count() -> int:
    """How many devices `simulator.configure` made."""
    return native().device_count()


def current_device() -> int:
    """The index of this thread's current device."""
    return native().current_device()


def set_device(device: DeviceName) -> None:
    """Make ``device`` this thread's current one."""
    native().set_device(index_of(device))


class device(contextlib.ContextDecorator):  # noqa: N801 - torch.cuda.device is spelt so
    """Make a device the current one while the context lasts; None changes nothing."""

    def __init__(self, device: DeviceName) -> None:
        self.idx = index_of(device)
        self._previous: list[int] = []

    def __enter__(self) -> None:
        self._previous.append(native().current_device())
        native().set_device(self.idx)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        native().set_device(self._previous.pop())


class device_of(device):  # noqa: N801 - as above
    """Make the device of a tensor the current one; a tensor of another type changes nothing."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == device_type() else None)


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What is known of a device.

    Attributes:
        name: for a person.
        total_memory: bytes.
    """

    name: str
    total_memory: int


def get_device_name(device: DeviceName = None) -> str:
    """Name a device for a person."""
    return f"Simulated accelerator {index_of(device)}"


def get_device_properties(device: DeviceName = None) -> DeviceProperties:
    """Describe a device."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1])


def get_device_capability(device: DeviceName = None) -> tuple[int, int]:
    """A version of the simulated hardware: always 1.0."""
    native().mem_get_info(index_of(device))  # raises for a device that is not there
    return (1, 0)


def synchronize(device: DeviceName = None) -> None:
    """Wait for all streams of a device; raise the first error of what they ran."""
    native().synchronize(index_of(device))


# ---------------------------------------------------------------- memory


def empty_cache() -> None:
    """Give cached memory of all devices back."""
    native().empty_cache()


def mem_get_info(device: DeviceName = None) -> tuple[int, int]:
    """Free and total bytes, as a driver counts them: cached memory is not free."""
    return native().mem_get_info(index_of(device))


def memory_allocated(device: DeviceName = None) -> int:
    """Bytes in live tensors, each rounded up to 512."""
    return _statistic(device, "allocated_bytes", "current")


def memory_reserved(device: DeviceName = None) -> int:
    """Bytes taken from the device: those of live tensors and the cache."""
    return _statistic(device, "reserved_bytes", "current")


def max_memory_allocated(device: DeviceName = None) -> int:
    """The most that `memory_allocated` has been."""
    return _statistic(device, "allocated_bytes", "peak")


def max_memory_reserved(device: DeviceName = None) -> int:
    """The most that `memory_reserved` has been."""
    return _statistic(device, "reserved_bytes", "peak")


def _statistic(device: DeviceName, name: str, kind: str) -> int:
    """One number of `memory_stats`, in a tenth of the time."""
    index = index_of(device)
    if not torch._C._accelerator_isAllocatorInitialized():
        return 0
    return int(torch._C._accelerator_getDeviceStats(index)[name]["all"][kind])


def memory_stats(device: DeviceName = None) -> dict[str, Any]:
    """The allocator's statistics, with the keys of ``torch.cuda.memory_stats``."""
    return dict(torch.accelerator.memory_stats(index_of(device)))


def host_memory_stats() -> dict[str, Any]:
    """Bytes of pinned memory in use, by the name that ``torch.cuda`` has for it."""
    return {"active_bytes.current": native().pinned_bytes()}


def reset_peak_memory_stats(device: DeviceName = None) -> None:
    """Let the maxima start from now."""
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def reset_accumulated_memory_stats(device: DeviceName = None) -> None:
    """Let the sums start from now."""
    torch.accelerator.reset_accumulated_memory_stats(index_of(device))


# ---------------------------------------------------------------- streams and events


class _OfThisType(type):
    """Torch makes plain streams and events itself, and takes no subclass where it compares two.

    So the classes below make plain ones, too, and each plain one of this device type is theirs.
    """

    def __instancecheck__(cls, value: object) -> bool:
        return (
            isinstance(value, cls.__mro__[1]) and torch.device(value.device).type == device_type()  # type: ignore[attr-defined]
        )


class Stream(torch.Stream, metaclass=_OfThisType):
    """A queue of work on a device, next to its others."""

    def __new__(cls, device: DeviceName = None, priority: int = 0) -> torch.Stream:  # type: ignore[misc]
        """Take a stream from the device's pool of 32. The priority changes nothing."""
        return torch.Stream(torch.device(device_type(), index_of(device)), priority=priority)


class Event(torch.Event, metaclass=_OfThisType):
    """A mark in a stream's work."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """Make an event of this device type; it belongs to the device that first records it."""
        return torch.Event(device_type(), enable_timing=enable_timing, blocking=blocking)


def current_stream(device: DeviceName = None) -> torch.Stream:
    """The stream on which this thread's work for the device is queued."""
    return torch.accelerator.current_stream(index_of(device))


def default_stream(device: DeviceName = None) -> torch.Stream:
    """The stream that is current until another is made so."""
    return torch.Stream(
        stream_id=0,
        device_index=index_of(device),
        device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
    )


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream, and its device, current for this thread."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Queue this thread's work on ``stream`` while the context lasts; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


# ---------------------------------------------------------------- precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may choose."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Say whether bfloat16 can be computed with."""
    return True
