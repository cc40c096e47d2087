"""By which errors a device says that it does not have something."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["is_refusal", "is_refused_view"]

_WORDS: Final = re.compile(
    r"not (yet |currently )?(implemented|supported|available)|unsupported|un-?implemented"
    r"|(does not|doesn't|only|can't|cannot) (yet |currently )?support|supports only|no kernel"
    r"|could not run|not have .*(kernel|implementation)",
    re.IGNORECASE,
)


def is_refusal(error: Exception) -> bool:
    """Whether an error says that the device does not have what was asked for."""
    return isinstance(error, NotImplementedError) or bool(_WORDS.search(str(error)))


def is_refused_view(error: BaseException) -> bool:
    """Whether torch's own formula of an operator cannot take the order of dimensions in memory.

    A device without a kernel of its own for `torch.native_group_norm` uses torch's formula, which
    makes a view of the input and refuses what is channels-last.
    """
    return isinstance(error, RuntimeError) and "view size is not compatible" in str(error)
