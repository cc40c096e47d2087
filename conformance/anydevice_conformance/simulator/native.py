"""What the compiled part offers, for the type checker. Indices are ints, sizes bytes, times us."""

# ruff: noqa: D102 - the functions without a docstring are those of device_module and control
from __future__ import annotations

from typing import Any, Protocol

import torch

__all__ = ["Native"]


class Native(Protocol):
    """The extension module. Every call may be made from any thread."""

    MAX_DEVICES: int

    def configure(
        self,
        capacity: list[int],
        mode: int,
        seed: int,
        h2d: float,
        d2h: float,
        p2p: float,
        hbm: float,
        copy_latency: float,
        kernel: float,
        launch: float,
        poison: bool,
        async_kernels: bool,
        pinned_limit: int,
    ) -> None:
        """Drain, give the cache back, forget times and counters, start again."""

    def device_count(self) -> int: ...
    def current_device(self) -> int: ...
    def set_device(self, device: int) -> None: ...
    def synchronize(self, device: int) -> None: ...

    def drain(self) -> None:
        """Run all that is queued; forget its errors; count nothing."""

    def settle_before_fork(self) -> None:
        """Have worker threads finish what is queued, since a child has none."""

    def empty_cache(self) -> None: ...
    def mem_get_info(self, device: int) -> tuple[int, int]: ...
    def pinned_bytes(self) -> int: ...
    def default_generator(self, device: int) -> torch.Generator: ...

    def make_collectives(self, carrier: Any) -> Any:
        """A backend of torch.distributed, given one that moves host memory between ranks."""

    def counters(self, device: int) -> dict[str, int]: ...
    def reset_counters(self) -> None: ...
    def clock_us(self) -> float: ...
    def advance_clock(self, us: float) -> None: ...
    def start_trace(self) -> None: ...
    def stop_trace(self) -> list[tuple[str, int, int, int, float, float]]: ...
