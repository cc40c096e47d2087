"""Bringing an offload store's files to the disk while its writer goes on.

[Note: whole before it is synced]
What was written is in the system's memory at once: every process reads it from there, and it
survives the death of the writer. Only when the machine itself stops can it be lost, so a store need
not be on the disk before it is used. Its manifest names the boot in which it was written, and is
good for that boot alone; a thread then syncs the files, and marks the manifest as good for ever.
Where the system does not tell one boot from another, the writer waits for the sync.
"""

from __future__ import annotations

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from anydevice.checkpoint.store_manifest import MANIFEST_NAME, SYNCED_AT, Manifest

__all__ = ["Syncing", "sync_folder"]

_log: Final = logging.getLogger("anydevice.checkpoint")


class Syncing:
    """Syncs files in the order in which they come, in a thread of its own.

    It owns the descriptors it is given. Python ends only when the thread has done its work. Leaving
    the context by an error waits for it, so that the files can be removed.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "anydevice-sync")
        self._error: OSError | None = None

    def __enter__(self) -> Syncing:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(wait=kind is not None)

    def take(self, descriptor: int) -> None:
        """Sync a file that is whole, and close it."""
        self._pool.submit(self._sync, descriptor)

    def finish(self, folder: Path, manifest: Manifest) -> None:
        """Mark a manifest as synced, once all that was taken is."""
        self._pool.submit(self._finish, folder, manifest)

    def wait(self) -> None:
        """Wait for all that was taken; nothing can be taken after.

        Raises:
            OSError: the disk refused.
        """
        self._pool.shutdown()
        if self._error is not None:
            raise self._error

    def _sync(self, descriptor: int) -> None:
        try:
            os.fsync(descriptor)
        except OSError as error:
            self._error = self._error or error
        finally:
            os.close(descriptor)

    def _finish(self, folder: Path, manifest: Manifest) -> None:
        try:
            if self._error is not None:
                raise self._error
            sync_folder(folder)
            _mark(folder / MANIFEST_NAME, manifest)
            sync_folder(folder)
        except FileNotFoundError:
            pass  # somebody removed the folder: it is of no interest any more
        except OSError as error:
            _log.error(
                "the offload store %s could not be brought to the disk: %s. Its weights may be "
                "lost, also to the model that runs on it: offload it anew, to another disk.",
                folder,
                error,
            )


def _mark(path: Path, manifest: Manifest) -> None:
    """Say in a manifest's file that what it names is on the disk; leave another one alone.

    One byte is changed in place: nothing may be made in a folder that is being removed.
    """
    with open(path, "r+b", buffering=0) as file:
        if file.read() == manifest.dump():
            os.pwrite(file.fileno(), b"1", SYNCED_AT)
            os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last; a system that cannot open folders needs no such thing."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except (PermissionError, IsADirectoryError):
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
