"""The zip archives that `torch.save` writes: which bytes of the file belong to which storage.

Torch takes the size of a storage from the pickle, and does not compare it with the record's. Nor
does it say where in memory its mapping of the file begins. So the storages that it makes are
recorded, and compared with the archive's own table: each must be exactly one record.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import zipfile
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch

from anydevice.errors import CorruptCheckpointError

__all__ = ["Archive", "noting_storages"]

#: Bytes of the pickle, which takes about 200 for each tensor.
_LARGEST_PICKLE: Final = 100_000_000


class Archive(NamedTuple):
    """What a zip archive says of itself.

    Attributes:
        path: of the file.
        records: offset to size of each storage's bytes.
        is_native: whether the bytes are in this machine's order, and so can be mapped.
    """

    path: str
    records: dict[int, int]
    is_native: bool

    @classmethod
    def read(cls, path: str) -> Archive:
        """Read the table of an archive.

        Raises:
            CorruptCheckpointError: it is not a complete archive, or torch did not write it.
        """
        records: dict[int, int] = {}
        is_native = True
        try:
            with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
                for entry in archive.infolist():
                    _check(path, entry)
                    if "/data/" in entry.filename and entry.file_size:
                        records[_offset(file, entry)] = entry.file_size
                    elif entry.filename.endswith("/byteorder"):
                        with archive.open(entry) as order:
                            is_native = order.read(16) == sys.byteorder.encode()
        except CorruptCheckpointError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged archive can fail in any way
            raise _corrupt(path, f"is not a complete zip archive: {error!s:.200}") from None
        return cls(path, records, is_native)

    def start_in_memory(self, storages: list[tuple[int, int]]) -> int:
        """The address of the file's first byte in torch's mapping.

        Args:
            storages: address and size of all that torch made; the first of them is the first
                record.

        Raises:
            CorruptCheckpointError: a storage is not exactly one record.
        """
        start = min(storages)[0] - min(self.records, default=0)
        for address, nbytes in storages:
            found = self.records.get(address - start)
            if found is None:
                raise _corrupt(self.path, "has a tensor where the archive has no record")
            if found != nbytes:
                raise _corrupt(
                    self.path, f"has a tensor of {nbytes:,} bytes in a record of {found:,}"
                )
        return start


def _check(path: str, entry: zipfile.ZipInfo) -> None:
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CorruptCheckpointError(
            f"{path} has the compressed entry {entry.filename!r:.200}; torch.save compresses "
            "nothing. Save it again."
        )
    if entry.filename.endswith("/data.pkl") and entry.file_size > _LARGEST_PICKLE:
        raise _corrupt(
            path, f"has a pickle of {entry.file_size:,} bytes; {_LARGEST_PICKLE:,} is most"
        )


def _offset(file: Any, entry: zipfile.ZipInfo) -> int:
    """Where an entry's bytes begin: behind its local header, whose length is in the header."""
    file.seek(entry.header_offset + 26)
    lengths = file.read(4)
    return (
        entry.header_offset
        + 30
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )


def _corrupt(path: str, why: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} {why}. Fetch it again, or save it again.")


# ---------------------------------------------------------------------- what torch makes of it


class _Noted(threading.local):
    into: list[tuple[int, int]] | None = None


_noted = _Noted()


@contextlib.contextmanager
def noting_storages(into: list[tuple[int, int]]) -> Iterator[None]:
    """Note address and size of each storage that this thread loads from a zip archive."""
    _register()
    _noted.into = into
    try:
        yield
    finally:
        _noted.into = None


@functools.cache
def _register() -> None:
    """Have torch show each storage that it loads, before it decides where that goes."""
    torch.serialization.register_package(0, lambda storage: None, _note)


def _note(storage: Any, location: str) -> None:
    """Note a storage; None leaves it to torch to place it."""
    if _noted.into is not None and storage.device.type == "cpu" and storage.nbytes():
        _noted.into.append((storage.data_ptr(), storage.nbytes()))
