"""Arguments that say how to load, checked before any work starts."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Final

from anydevice.errors import BudgetError, OptionError
from anydevice.text import parse_bytes, whole_number

__all__ = ["DEFAULT_BUFFER_BYTES", "LoadOptions"]

#: Bytes of all buffers together, unless the caller says otherwise.
DEFAULT_BUFFER_BYTES: Final = 256 << 20


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Arguments of `load_checkpoint_in_model` that say how, not what; checked when it is made.

    Raises:
        OptionError: one cannot be used; the message names it.
    """

    offload_folder: str | None = None
    preload: bool = False
    buffer_bytes: int = DEFAULT_BUFFER_BYTES
    workers: int | None = None
    strict: bool = False
    allow_missing: bool = False

    def __post_init__(self) -> None:
        read: dict[str, Any] = {}
        if self.offload_folder is not None:
            try:
                read["offload_folder"] = os.fsdecode(self.offload_folder)
            except TypeError:
                raise OptionError(
                    f"offload_folder={self.offload_folder!r}: a path is needed"
                ) from None
        try:
            read["buffer_bytes"] = parse_bytes(self.buffer_bytes)
        except BudgetError as error:
            raise OptionError(f"buffer_bytes={self.buffer_bytes!r}: {error}") from None
        if self.workers is not None:
            read["workers"] = whole_number("workers", self.workers, 1, "how many threads read")
        for name, value in read.items():
            object.__setattr__(self, name, value)
