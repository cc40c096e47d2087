"""The current device of a thread, while a module runs on another.

A kernel that is not torch's own (Triton's, a vendor's) is launched on the thread's current device,
and a bare ``"foo"`` means that one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from anydevice import registry
from anydevice.backend import DeviceBackend
from anydevice.devices import Device

__all__ = ["current_device"]

_NOTHING = contextlib.nullcontext()


def current_device(device: Device | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which a device is the current one of its type.

    None, the host, and the only device of its type change nothing.
    """
    if device is None or device.index is None or not device.is_accelerator:
        return _NOTHING
    backend = registry.get_backend(device.torch)
    before = backend.current_device()
    if before is None or before == device.index:
        return _NOTHING
    return _switched(backend, device.index, before)


@contextlib.contextmanager
def _switched(backend: DeviceBackend, index: int, before: int) -> Iterator[None]:
    try:
        try:
            backend.set_device(index)
            yield
        finally:
            backend.set_device(before)
    finally:  # an interrupt may have cut the first short
        if backend.current_device() != before:
            backend.set_device(before)
