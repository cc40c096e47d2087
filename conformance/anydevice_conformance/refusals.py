"""By which errors a device says that it does not have something."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_refusal"]

_WORDS: Final = re.compile(
    r"not (yet |currently )?(implemented|supported|available)|unsupported|un-?implemented"
    r"|(does not|doesn't|only|can't|cannot) (yet |currently )?support|supports only|no kernel"
    r"|could not run|not have .*(kernel|implementation)",
    re.IGNORECASE,
)


def is_refusal(error: Exception) -> bool:
    """Whether an error says that the device does not have what was asked for."""
    return isinstance(error, NotImplementedError) or bool(_WORDS.search(str(error)))
