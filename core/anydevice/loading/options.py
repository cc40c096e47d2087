"""Arguments that say how to load, checked before any work starts."""

from __future__ import annotations

import dataclasses
import os
from typing import Final

from anydevice.errors import BudgetError, OptionError
from anydevice.text import parse_bytes, whole_number

__all__ = ["DEFAULT_BUFFER_BYTES", "LoadOptions", "read_options"]

#: Bytes of all buffers together, unless the caller says otherwise.
DEFAULT_BUFFER_BYTES: Final = 256 << 20


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Arguments of `load_checkpoint_in_model` that say how, not what. Made by `read_options`."""

    offload_folder: str | os.PathLike[str] | None = None
    preload: bool = False
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    workers: int | None = None
    strict: bool = False
    allow_missing: bool = False


def read_options(
    offload_folder: str | os.PathLike[str] | None = None,
    preload: bool = False,
    buffer_bytes: int | str = DEFAULT_BUFFER_BYTES,
    workers: int | None = None,
    strict: bool = False,
    allow_missing: bool = False,
) -> LoadOptions:
    """Check arguments.

    Raises:
        OptionError: one cannot be used; the message names it.
    """
    return LoadOptions(
        None if offload_folder is None else _folder(offload_folder),
        preload,
        _buffer_bytes(buffer_bytes),
        None if workers is None else whole_number("workers", workers, 1, "how many threads read"),
        strict,
        allow_missing,
    )


def _folder(folder: str | os.PathLike[str]) -> str:
    try:
        return os.fsdecode(folder)
    except TypeError:
        raise OptionError(f"offload_folder={folder!r}: a path is needed") from None


def _buffer_bytes(size: int | str) -> int:
    try:
        return parse_bytes(size)
    except BudgetError as error:
        raise OptionError(f"buffer_bytes={size!r}: {error}") from None
