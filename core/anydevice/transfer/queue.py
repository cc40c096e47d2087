"""A device's queue of copies: its streams and events, as far as copying needs them.

Where the backend has no streams, streams and events are None and every method does nothing: copies
then run one by one on the only queue there is.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from anydevice import registry
from anydevice.devices import Device

__all__ = ["DeviceQueue"]


class DeviceQueue:
    """One device's streams.

    Attributes:
        device: which device.
        torch_device: the same, as torch spells it.
        backend: everything that talks to it.
        has_streams: whether it has streams; if not, all streams and events are None.
        pins: whether copies from page-locked memory are asynchronous.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.torch_device = device.torch
        self.index = device.index or 0
        self.backend = registry.get_backend(self.torch_device)
        can = self.backend.capabilities
        self.has_streams = can.streams and device.is_accelerator
        self.pins = self.has_streams and can.pinned_memory
        self._copy_stream: Any = None

    def is_current(self) -> bool:
        """Whether the registry still names this backend for the device."""
        return registry.get_backend(self.torch_device) is self.backend

    # ------------------------------------------------------------------ order

    @property
    def copy_stream(self) -> Any:
        """The stream on which weights are copied."""
        if self._copy_stream is None and self.has_streams:
            self._copy_stream = self.backend.new_stream(self.index)
        return self._copy_stream

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        return self.backend.current_stream(self.index) if self.has_streams else None

    def record(self, stream: Any) -> Any:
        """An event after everything that is queued on a stream so far."""
        return self.backend.record_event(stream) if stream is not None else None

    def wait(self, stream: Any, event: Any) -> None:
        """Make a stream's later work wait for an event."""
        if stream is not None and event is not None:
            self.backend.wait_event(stream, event)

    def synchronize(self, event: Any) -> None:
        """Make the host wait for an event."""
        if event is not None:
            self.backend.synchronize_event(event)

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Queue this thread's work on the copy stream."""
        if not self.has_streams:
            return contextlib.nullcontext()
        return self.backend.use_stream(self.copy_stream)

    # ------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> torch.Tensor:
        """New device memory, from the allocator of the calling thread's current stream."""
        with torch._C._InferenceMode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.torch_device)

    def free_bytes(self) -> int | None:
        """Bytes that are free on the device; None where it does not tell."""
        try:
            return self.backend.memory_info(self.index).free
        except NotImplementedError:
            return None
