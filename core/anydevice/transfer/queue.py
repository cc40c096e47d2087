"""A queue: one executing device as the engine sees it, with its side stream and its buffers.

Where the backend has no streams they are None, and nothing here does anything: weights then travel
one by one on the only queue there is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from anydevice import registry
from anydevice.devices import Device
from anydevice.transfer.pool import Pool
from anydevice.transfer.staging import Stager

__all__ = ["DeviceQueue"]


class DeviceQueue:
    """One executing device.

    Attributes:
        device: which.
        backend: all that talks to it.
        streams: whether it has streams; where not, all streams and events are None.
        limit: bytes that visiting weights may take ahead of time; None for no limit.
        tight: memory ran out once: nothing is brought ahead of time any more.
    """

    def __init__(self, device: Device, limit: int | None) -> None:
        self.device = device
        self.place = device.torch
        self.index = device.index or 0
        self.backend = registry.get_backend(self.place)
        can = self.backend.capabilities
        self.streams = can.streams and device.is_accelerator
        self.pins = self.streams and can.pinned_memory
        self.limit = limit if limit is not None or not self.streams else self._measure()
        self._side: Any = None
        self.tight = False
        self.pool = Pool(self)
        self.stager = Stager(self)

    def is_current(self) -> bool:
        """Whether the registry still names this queue's backend for the device."""
        return registry.get_backend(self.place) is self.backend

    def _measure(self) -> int | None:
        """Half of what is free: the other half is for activations."""
        try:
            return self.backend.memory_info(self.index).free // 2
        except NotImplementedError:
            return None

    # ------------------------------------------------------------------ order

    @property
    def side(self) -> Any:
        """The stream on which weights travel."""
        if self._side is None and self.streams:
            self._side = self.backend.new_stream(self.index)
        return self._side

    def here(self) -> Any:
        """The calling thread's current stream."""
        return self.backend.current_stream(self.index) if self.streams else None

    def mark(self, stream: Any) -> Any:
        """An event after all that is queued on a stream so far."""
        return self.backend.record_event(stream) if stream is not None else None

    def wait(self, stream: Any, event: Any) -> None:
        """Let a stream's later work come after an event."""
        if stream is not None and event is not None:
            self.backend.wait_event(stream, event)

    def on_side(self) -> contextlib.AbstractContextManager[Any]:
        """Queue this thread's work on the side stream."""
        if not self.streams:
            return contextlib.nullcontext()
        return self.backend.use_stream(self.side)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New device memory, of the calling thread's current stream."""
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.place)

    def lacks_memory(self, error: BaseException) -> bool:
        """Whether an error says that the device's memory is used up."""
        return self.backend.is_out_of_memory(error)
