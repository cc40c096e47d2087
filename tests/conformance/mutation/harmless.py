"""Mutants by rule that nothing needs to find: each with the reason why it harms nobody.

The engine leaves them out of its rate. A test holds that the rules still make each of them.
"""

from __future__ import annotations

from typing import Final

__all__ = ["HARMLESS"]

#: The name of a mutant to the reason.
HARMLESS: Final[dict[str, str]] = {}
