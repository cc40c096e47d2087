"""The reference's import path for what is here. No logic here.

``is_foo_available`` is there for any ``foo``.
"""

from typing import Any

from anydevice.environment import availability as _availability
from anydevice.utils import is_bf16_available, is_fp16_available

__all__ = ["is_bf16_available", "is_fp16_available"]


def __getattr__(name: str) -> Any:
    found = _availability(name)
    if found is None:
        raise AttributeError(f"module 'anydevice.utils.imports' has no attribute {name!r}")
    return found
