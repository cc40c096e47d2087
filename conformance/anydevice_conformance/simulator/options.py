"""What a simulated machine is like: its options, their defaults, and how they are spelt."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, Final, Literal, get_args

from anydevice.text import parse_bytes

__all__ = ["MODES", "Memory", "Mode", "Options", "parse_options"]

#: When queued work runs; see `Options`.
Mode = Literal["sync", "lazy", "thread", "random"]
#: The modes, each at the index by which the compiled part knows it.
MODES: Final[tuple[str, ...]] = get_args(Mode)
_MOST_DEVICES: Final = 16
#: Bytes as a number, or text such as ``"64MiB"``.
Memory = int | str


@dataclasses.dataclass(frozen=True)
class Options:
    """A simulated machine.

    Attributes:
        devices: how many devices, 1 to 16.
        memory: the cap of every device, or a list with one for each: bytes, or ``"64MiB"``.
        mode: when queued work runs. ``"sync"``: at once. ``"lazy"``: as late as is allowed, when
            something waits for it. ``"thread"``: on a thread for each stream, in real time.
            ``"random"``: in an order that ``seed`` decides.
        seed: of the order in mode ``"random"``.
        h2d, d2h, p2p, hbm: bandwidths in MB/s (1e6 bytes a second): host to device and back (half
            of it for memory that is not pinned), device to device, and within a device.
        copy_latency, kernel, launch: microseconds that a copy takes to start, that a kernel
            runs, and that the host spends to queue either.
        poison: fill new and freed device memory with bytes 0xFF, which are NaN as floats.
        async_kernels: queue kernels, too; with False only copies are asynchronous.
        pinned_limit: how many bytes of pinned memory there are; None for no limit.
    """

    devices: int = 2
    memory: Memory | Sequence[Memory] = "1GiB"
    mode: Mode = "lazy"
    seed: int = 0
    h2d: float = 12e3
    d2h: float = 12e3
    p2p: float = 20e3
    hbm: float = 1e6
    copy_latency: float = 10.0
    kernel: float = 5.0
    launch: float = 2.0
    poison: bool = True
    async_kernels: bool = True
    pinned_limit: Memory | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a machine that cannot be."""
        if self.mode not in MODES:
            raise ValueError(f"mode={self.mode!r}: the modes are {', '.join(MODES)}")
        for name in ("h2d", "d2h", "p2p", "hbm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: a bandwidth is above 0 MB/s")
        for name in ("copy_latency", "kernel", "launch"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: a time is 0 us or more")
        self.capacities()

    def capacities(self) -> list[int]:
        """The cap of each device, in bytes."""
        if isinstance(self.memory, int | str):
            return [parse_bytes(self.memory)] * self.devices
        if len(self.memory) != self.devices:
            raise ValueError(
                f"memory has {len(self.memory)} values for {self.devices} devices: give one value, "
                "or one for each device"
            )
        return [parse_bytes(value) for value in self.memory]

    def native_arguments(self) -> dict[str, Any]:
        """The options as the compiled part takes them."""
        arguments = dataclasses.asdict(self)
        del arguments["devices"], arguments["memory"]
        arguments["mode"] = MODES.index(self.mode)
        limit = self.pinned_limit
        arguments["pinned_limit"] = sys.maxsize if limit is None else parse_bytes(limit)
        return {"capacity": self.capacities(), **arguments}


def parse_options(text: str) -> Options:
    """Read ``"devices=2,memory=64MiB:1GiB,mode=lazy"``; ``"1"`` names the defaults.

    Raises:
        ValueError: an option that is not known or whose value cannot be read.
    """
    given: dict[str, Any] = {}
    if text.strip().lower() in ("1", "true", "yes", "on"):
        return Options()
    for part in text.split(","):
        name, _, value = (word.strip() for word in part.partition("="))
        if name not in _READERS or not value:
            raise ValueError(
                f"cannot read {part.strip()!r}: write name=value, separated by commas, with the "
                f"names {', '.join(_READERS)}"
            )
        try:
            given[name] = _READERS[name](value)
        except ValueError as error:
            kind = {int: "a whole number", float: "a number"}.get(_READERS[name])
            why = f"{value!r} is not {kind}" if kind else error
            raise ValueError(f"{name}={value}: {why}") from None
    if not 1 <= given.get("devices", 1) <= _MOST_DEVICES:
        raise ValueError(f"devices={given['devices']}: there can be 1 to {_MOST_DEVICES}")
    return Options(**given)


def _read_memory(value: str) -> Memory | list[Memory]:
    parts: list[Memory] = list(value.split(":"))
    return parts if len(parts) > 1 else parts[0]


def _read_bool(value: str) -> bool:
    words = {"1": True, "true": True, "0": False, "false": False}
    if value.lower() not in words:
        raise ValueError(f"{value!r} is neither true nor false")
    return words[value.lower()]


_READERS: Final[dict[str, Any]] = {
    "devices": int,
    "memory": _read_memory,
    "mode": str,
    "seed": int,
    **dict.fromkeys(("h2d", "d2h", "p2p", "hbm", "copy_latency", "kernel", "launch"), float),
    "poison": _read_bool,
    "async_kernels": _read_bool,
    "pinned_limit": str,
}
