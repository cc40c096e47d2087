"""Folders of checkpoints: complete or absent, numbered by what is on the disk.

[Note: how a crash leaves them] A checkpoint is written into a folder next to its own, whose name
begins with a dot, and is renamed when every process has written its part and the files are on the
disk. Where the folder is there already, it may hold the user's other files: the new ones are put
next to them in a folder ``.staged``, whose renaming to that name is the moment at which the new
checkpoint counts; then each is moved to its place. A process that ends before that moment leaves
the old checkpoint, one that ends after it leaves the rest of the moves, which `complete` makes up
for before anything is read or written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Final

from anydevice.errors import CheckpointNotFoundError

__all__ = [
    "Writing",
    "complete",
    "newest",
    "next_number",
    "numbered",
    "remove_oldest",
    "remove_rest",
]

_NUMBERED: Final = re.compile(r"checkpoint_(\d+)")
_STAGED: Final = ".staged"
_WRITING: Final = ".incomplete"
_REMOVED: Final = ".removed"


class Writing:
    """A checkpoint on its way to a folder.

    Args:
        folder: where it goes.

    Attributes:
        place: where its files are written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_new = not folder.exists()
        if self.is_new:
            self.place = folder.parent / f"{_WRITING}-{folder.name}"
        else:
            self.place = folder / _WRITING

    def begin(self) -> None:
        """Make the folder to write in; what another run left in it is removed."""
        complete(self.folder)
        if self.place.exists():
            shutil.rmtree(self.place)
        self.place.mkdir(parents=True)

    def commit(self) -> None:
        """Make the checkpoint the folder's: from here on it is the one that is loaded."""
        for path in sorted(self.place.rglob("*")):
            _sync(path)
        _sync(self.place)
        if self.is_new:
            self.place.rename(self.folder)
        else:
            self.place.rename(self.folder / _STAGED)
            complete(self.folder)
        _sync(self.folder.parent)

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.place, ignore_errors=True)


def complete(folder: Path) -> None:
    """Make the moves that a process could not finish, after its checkpoint counted."""
    staged = folder / _STAGED
    if not staged.exists():
        return
    for path in sorted(staged.iterdir()):
        target = folder / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.replace(path, target)
    staged.rmdir()
    _sync(folder)


def numbered(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder with their numbers, the oldest first."""
    if not folder.is_dir():
        return []
    found = [(_NUMBERED.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir()]
    return sorted((int(match[1]), path) for match, path in found if match)


def next_number(folder: Path) -> int:
    """The number after the highest on the disk."""
    have = numbered(folder)
    return have[-1][0] + 1 if have else 0


def newest(folder: Path) -> Path:
    """The checkpoint with the highest number.

    Raises:
        CheckpointNotFoundError: there is none.
    """
    have = numbered(folder)
    if not have:
        raise CheckpointNotFoundError(
            f"no checkpoint in {str(folder)!r}: none was saved yet, or project_dir is another"
        )
    return have[-1][1]


def remove_oldest(folder: Path, keep: int) -> None:
    """Remove checkpoints but the ``keep`` newest: each is first renamed, so none is half there."""
    remove_rest(folder)
    for _, path in numbered(folder)[:-keep]:
        gone = folder / f"{_REMOVED}-{path.name}"
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def remove_rest(folder: Path) -> None:
    """Remove what processes left that ended while they removed a checkpoint."""
    if folder.is_dir():
        for path in folder.glob(f"{_REMOVED}-*"):
            shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    """Have the disk hold a file or a folder's entries; where that cannot be asked, go on."""
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
