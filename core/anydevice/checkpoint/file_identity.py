"""Which state of a file is read: identities, ranges, and errors of files that cannot be opened."""

from __future__ import annotations

import dataclasses
import errno
import os
import stat

from anydevice.errors import (
    AnyDeviceError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)

__all__ = ["FileIdentity", "FileSlice", "cannot_open"]


@dataclasses.dataclass(frozen=True)
class FileIdentity:
    """Identifies a file and its state.

    Attributes:
        size: in bytes.
        mtime_ns: when it was last written.
        device: number of the file system.
        inode: number of the file in it.
    """

    size: int
    mtime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> FileIdentity:
        """Ask the file system.

        Raises:
            CheckpointNotFoundError: no such file, or it cannot be reached.
            CorruptCheckpointError: it is not a regular file.
        """
        try:
            found = os.stat(path)
        except (OSError, ValueError) as error:
            raise cannot_open(path, error) from None
        return cls.from_stat(found, path)

    @classmethod
    def from_stat(cls, found: os.stat_result, path: str | os.PathLike[str]) -> FileIdentity:
        """From what the system said of the file at ``path``.

        Raises:
            CorruptCheckpointError: it is not a regular file.
        """
        if not stat.S_ISREG(found.st_mode):
            kind = "a folder" if stat.S_ISDIR(found.st_mode) else "not a regular file"
            raise CorruptCheckpointError(f"{os.fspath(path)} is {kind}, where a file should be")
        return cls(found.st_size, found.st_mtime_ns, found.st_dev, found.st_ino)


@dataclasses.dataclass(frozen=True)
class FileSlice:
    """Where in a file a tensor's bytes are.

    Attributes:
        path: absolute.
        offset: of its first byte.
        nbytes: how many there are.
    """

    path: str
    offset: int
    nbytes: int


def cannot_open(path: str | os.PathLike[str], error: OSError | ValueError) -> Exception:
    """The error to raise for a file that the system does not open."""
    if isinstance(error, AnyDeviceError):
        return error
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return CheckpointError(
            f"cannot open {os.fspath(path)}: {error.strerror}. Close files, or raise the limit of "
            "open files (`ulimit -n`)."
        )
    reason = getattr(error, "strerror", None) or error
    return CheckpointNotFoundError(f"cannot open {os.fspath(path)}: {reason}")
