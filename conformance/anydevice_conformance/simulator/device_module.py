"""The module that torch knows as ``torch.sim``: the surface that ``torch.cuda`` has made usual.

`bind` gives it its name and its compiled part; nothing here works before. A ``device`` is an
index, a string, a `torch.device`, or None for the current one. Sizes are bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from types import TracebackType

    from .native import Native

_native: Native | None = None
_type = "sim"

_Device = int | str | torch.device | None


def bind(device_type: str, native: Native) -> None:
    """Say once which name the device has and what drives it."""
    global _native, _type
    _type, _native = device_type, native


def native() -> Native:
    """The compiled part."""
    if _native is None:
        raise RuntimeError("the simulator is not installed: call simulator.install() first")
    return _native


def _index(device: _Device = None) -> int:
    if isinstance(device, int):
        return device
    if device is not None:
        parsed = torch.device(device)
        if parsed.type != _type:
            raise ValueError(f"expected a {_type} device, got {parsed}")
        if parsed.index is not None:
            return int(parsed.index)
    return native().current_device()


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


def _is_in_bad_fork() -> bool:
    return False  # the compiled part repairs itself in a forked child


def device_count() -> int:
    """How many devices `simulator.configure` made."""
    return native().device_count()


def current_device() -> int:
    """The index of this thread's current device."""
    return native().current_device()


def set_device(device: _Device) -> None:
    """Make ``device`` this thread's current one."""
    native().set_device(_index(device))


class device(contextlib.ContextDecorator):  # noqa: N801 - torch.cuda.device is spelt so
    """Make a device the current one while the context lasts; None changes nothing."""

    def __init__(self, device: _Device) -> None:
        self.idx = _index(device)
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
        super().__init__(tensor.device if tensor.device.type == _type else None)


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What is known of a device.

    Attributes:
        name: for a person.
        total_memory: bytes.
    """

    name: str
    total_memory: int


def get_device_name(device: _Device = None) -> str:
    """Name a device for a person."""
    return f"Simulated accelerator {_index(device)}"


def get_device_properties(device: _Device = None) -> DeviceProperties:
    """Describe a device."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1])


def get_device_capability(device: _Device = None) -> tuple[int, int]:
    """A version of the simulated hardware: always 1.0."""
    native().mem_get_info(_index(device))  # raises for a device that is not there
    return (1, 0)


def synchronize(device: _Device = None) -> None:
    """Wait for all streams of a device; raise the first error of what they ran."""
    native().synchronize(_index(device))


# ---------------------------------------------------------------- memory


def empty_cache() -> None:
    """Give cached memory of all devices back."""
    native().empty_cache()


def mem_get_info(device: _Device = None) -> tuple[int, int]:
    """Free and total bytes, as a driver counts them: cached memory is not free."""
    return native().mem_get_info(_index(device))


def memory_allocated(device: _Device = None) -> int:
    """Bytes in live tensors, each rounded up to 512."""
    return torch.accelerator.memory_allocated(_index(device))


def memory_reserved(device: _Device = None) -> int:
    """Bytes taken from the device: those of live tensors and the cache."""
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_allocated(device: _Device = None) -> int:
    """The most that `memory_allocated` has been."""
    return torch.accelerator.max_memory_allocated(_index(device))


def max_memory_reserved(device: _Device = None) -> int:
    """The most that `memory_reserved` has been."""
    return torch.accelerator.max_memory_reserved(_index(device))


def memory_stats(device: _Device = None) -> dict[str, Any]:
    """The allocator's statistics, with the keys of ``torch.cuda.memory_stats``."""
    return dict(torch.accelerator.memory_stats(_index(device)))


def host_memory_stats() -> dict[str, Any]:
    """Bytes of pinned memory in use, by the name that ``torch.cuda`` has for it."""
    return {"active_bytes.current": native().pinned_bytes()}


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Let the maxima start from now."""
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Let the sums start from now."""
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


# ---------------------------------------------------------------- streams and events


class _OfThisType(type):
    """Torch makes plain streams and events itself, and takes no subclass where it compares two.

    So the classes below make plain ones, too, and each plain one of this device type is theirs.
    """

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, cls.__mro__[1]) and torch.device(value.device).type == _type  # type: ignore[attr-defined]


class Stream(torch.Stream, metaclass=_OfThisType):
    """A queue of work on a device, next to its others."""

    def __new__(cls, device: _Device = None, priority: int = 0) -> torch.Stream:  # type: ignore[misc]
        """Take a stream from the device's pool of 32. The priority changes nothing."""
        return torch.Stream(torch.device(_type, _index(device)), priority=priority)


class Event(torch.Event, metaclass=_OfThisType):
    """A mark in a stream's work."""

    def __new__(  # type: ignore[misc]
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
    ) -> torch.Event:
        """Make an event of this device type; it belongs to the device that first records it."""
        return torch.Event(_type, enable_timing=enable_timing, blocking=blocking)


def current_stream(device: _Device = None) -> torch.Stream:
    """The stream on which this thread's work for the device is queued."""
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: _Device = None) -> torch.Stream:
    """The stream that is current until another is made so."""
    return torch.Stream(
        stream_id=0,
        device_index=_index(device),
        device_type=torch._C._autograd.DeviceType.PrivateUse1.value,
    )


def set_stream(stream: torch.Stream | None) -> None:
    """Make a stream, and its device, current for this thread."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
    """Queue this thread's work on ``stream`` while the context lasts; None changes nothing."""
    return contextlib.nullcontext() if stream is None else stream


# ---------------------------------------------------------------- random numbers


def _generator(device: _Device = None) -> torch.Generator:
    return native().default_generator(_index(device))


def manual_seed(seed: int) -> None:
    """Seed the current device's generator."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
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


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """The state of a device's generator: a uint8 tensor on the host."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Put back what `get_rng_state` gave."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """The states of all devices' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Put back what `get_rng_state_all` gave."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---------------------------------------------------------------- precision


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that ``torch.autocast`` may choose."""
    return [torch.float16, torch.bfloat16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Say whether bfloat16 can be computed with."""
    return True
