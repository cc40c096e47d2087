"""What loading did."""

from __future__ import annotations

import dataclasses

__all__ = ["LoadReport"]


@dataclasses.dataclass
class LoadReport:
    """What loading did.

    Attributes:
        mapped_bytes: that are views of the checkpoint's files.
        read_bytes: that were read, cast or moved.
        written_bytes: that were written to the offload folder.
        missing: names that the model has and the checkpoint lacks; those of buffers that are not
            persistent only where they are left on meta.
        unexpected: names that the checkpoint has and the model lacks.
    """

    mapped_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
