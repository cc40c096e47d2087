"""The reference's import path for memory. No logic here."""

from anydevice.utils import (
    clear_device_cache,
    find_executable_batch_size,
    release_memory,
)

__all__ = [
    "clear_device_cache",
    "find_executable_batch_size",
    "release_memory",
]
