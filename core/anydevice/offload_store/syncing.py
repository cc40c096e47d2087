"""Naming what was written in an offload store's manifest, and bringing it to the disk.

[Note: whole before it is synced]
What was written is in the system's memory at once: every process reads it from there, and it
survives the death of the writer. Only when the machine itself stops can it be lost, so a store need
not be on the disk before it is used. Its manifest names the boot in which it was written, and is
good for that boot alone; a thread then syncs the files, and marks the manifest as good for ever.
Where the system does not tell one boot from another, the writer waits for the sync.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from pathlib import Path
from typing import Final

from anydevice.offload_store.manifest import (
    LOST,
    MANIFEST_NAME,
    SYNCED,
    SYNCED_AT,
    Manifest,
)
from anydevice.offload_store.writing import write_atomically

__all__ = ["publish", "sync_later"]

_log: Final = logging.getLogger("anydevice.offload_store")


def publish(folder: Path, manifest: Manifest) -> None:
    """Make a manifest the folder's. Its files are synced before, where it is to outlive the boot.

    Raises:
        OSError: the system refused.
    """
    if manifest.boot is None:
        _sync_files(folder, manifest)
        write_atomically(folder / MANIFEST_NAME, manifest.dump())
        _sync(folder)
    else:
        write_atomically(folder / MANIFEST_NAME, manifest.dump(), synced=False)
        sync_later(folder, manifest)


def sync_later(folder: Path, manifest: Manifest) -> None:
    """Bring a store to the disk in a thread; Python ends only when that has done its work."""
    threading.Thread(
        target=_bring_to_disk, args=(folder, manifest), name="anydevice-sync", daemon=False
    ).start()


def _bring_to_disk(folder: Path, manifest: Manifest) -> None:
    try:
        _sync_files(folder, manifest)
        _mark(folder, manifest, SYNCED)
    except (FileNotFoundError, PermissionError):
        pass  # somebody removed the folder, or it is not ours to write to
    except OSError as error:
        _log.error(
            "the offload store %s could not be brought to the disk: %s. Its weights may be lost, "
            "also to the model that runs on it: offload it anew, to another disk.",
            folder,
            error,
        )
        # The system may give other bytes from now on: nobody else shall use them.
        with contextlib.suppress(OSError):
            _mark(folder, manifest, LOST)


def _mark(folder: Path, manifest: Manifest, mark: bytes) -> None:
    """Say in a manifest's file what became of the store; leave another's manifest alone.

    One byte is changed in place: nothing may be made in a folder that is being removed.
    """
    with open(folder / MANIFEST_NAME, "r+b", buffering=0) as file:
        if file.read() == manifest.dump():
            file.seek(SYNCED_AT)
            file.write(mark)
            os.fsync(file.fileno())


def _sync_files(folder: Path, manifest: Manifest) -> None:
    """Sync what lies in the folder; other files are pointed to, and were there before."""
    for file in manifest.files:
        if not os.path.isabs(file.path):
            _sync(folder / file.path, os.O_RDWR)
    _sync(folder)


def _sync(path: Path, flags: int = os.O_RDONLY) -> None:
    try:
        descriptor = os.open(path, flags)
    except (PermissionError, IsADirectoryError):
        if path.is_dir():  # a system that cannot open folders needs no such thing
            return
        raise
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
