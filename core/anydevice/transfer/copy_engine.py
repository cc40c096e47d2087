"""The copy engine of one device: its queue, its buffers and its staging ring."""

from __future__ import annotations

import warnings

from anydevice.devices import Device
from anydevice.transfer.buffers import BufferPool
from anydevice.transfer.queue import DeviceQueue
from anydevice.transfer.staging import Stager

__all__ = ["CopyEngine"]


class CopyEngine:
    """Everything that copies weights to one device.

    Args:
        device: which device.
        limit: bytes that weights may take there ahead of time; None for half of what is free.
    """

    def __init__(self, device: Device, limit: int | None) -> None:
        self.queue = DeviceQueue(device)
        self.pool = BufferPool(self.queue, limit)
        self.stager = Stager(self.queue)

    def free_memory(self) -> None:
        """The device is out of memory: give back what is not in use; nothing is copied ahead."""
        self.pool.clear()
        self.queue.backend.empty_cache(self.queue.index)
        if not self.pool.tight:
            self.pool.tight = True
            warnings.warn(
                f"{self.queue.device} is out of memory for weights that are copied ahead; from now "
                "on each group is copied when it is needed. Reserve more memory: a lower "
                "max_memory for this device, or a smaller prefetch_depth.",
                RuntimeWarning,
                stacklevel=2,
            )

    def settle(self) -> None:
        """Wait until no copy that is queued reads host memory any more."""
        self.queue.synchronize(self.queue.record(self.queue.copy_stream))

    def close(self, *, wait: bool) -> None:
        """Drop free buffers, the staging ring and threads; wait for these, or let them end."""
        self.stager.close(wait=wait)
        self.pool.clear()
