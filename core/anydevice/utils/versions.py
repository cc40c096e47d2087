"""The reference's import path for versions. No logic here."""

from anydevice.utils import (
    compare_versions,
    is_torch_version,
)

__all__ = [
    "compare_versions",
    "is_torch_version",
]
