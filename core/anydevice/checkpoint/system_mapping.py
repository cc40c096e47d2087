"""A file's bytes in memory, as the system maps them: private to this process, and no open file.

Before Python 3.13, `mmap` keeps a file open as long as its mapping lives, and thousands of shards
exceed the number of files that a process may have open. There the system's own function is called.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import sys
from typing import Any, Final

__all__ = ["map_descriptor", "read_ahead", "view_of"]

_PYTHON_CAN: Final = sys.platform == "win32" or sys.version_info >= (3, 13)


class _PythonMapping(mmap.mmap):
    """A buffer that can have attributes and weak references."""


def map_descriptor(descriptor: int, nbytes: int) -> Any:
    """Map the first bytes of an open file. What is written to them stays in this process.

    Returns:
        A writable buffer, which is unmapped when nothing refers to it. The file may be closed.

    Raises:
        OSError: the system refused.
    """
    if sys.platform == "win32":
        return _PythonMapping(descriptor, 0, access=mmap.ACCESS_COPY)
    # Without MAP_NORESERVE, Linux refuses to map a file that is larger than the memory, since each
    # of its pages might be written to.
    reserve = getattr(mmap, "MAP_NORESERVE", 0)
    if not reserve and sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
        reserve = 0x4000  # Python names it only from 3.13 on
    flags, access = mmap.MAP_PRIVATE | reserve, mmap.PROT_READ | mmap.PROT_WRITE
    if _PYTHON_CAN:
        new: Any = {"trackfd": False}
        return _PythonMapping(descriptor, 0, flags=flags, prot=access, **new)
    library = _libc()
    address = library.mmap(None, nbytes, access, flags, descriptor, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))

    array: Any = ctypes.c_ubyte * nbytes

    class Mapping(array):  # type: ignore[misc]
        def __del__(self) -> None:
            library.munmap(address, nbytes)

    return Mapping.from_address(address)


def view_of(mapping: Any) -> memoryview:
    """The bytes of a mapping; reading a slice copies them."""
    return memoryview(mapping).cast("B")


def read_ahead(mapping: Any, offset: int, nbytes: int) -> None:
    """Ask the system to read bytes of the file now. ``offset`` is a multiple of the page size."""
    if isinstance(mapping, mmap.mmap):
        if hasattr(mapping, "madvise"):
            mapping.madvise(mmap.MADV_WILLNEED, offset, nbytes)
        return
    _libc().madvise(ctypes.addressof(mapping) + offset, nbytes, mmap.MADV_WILLNEED)


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    library.mmap.restype = pointer
    library.mmap.argtypes = (pointer, size, number, number, number, ctypes.c_int64)
    library.munmap.argtypes = (pointer, size)
    library.madvise.argtypes = (pointer, size, number)
    return library
