"""Comparing versions, of packages and of the system."""

from __future__ import annotations

import importlib.metadata
import operator
import platform
import warnings
from collections.abc import Callable
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from anydevice.errors import OptionError

__all__ = ["check_os_kernel", "compare_versions", "is_torch_version"]

_OPERATIONS: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
#: Older kernels of Linux may hang when many processes share memory.
_OLDEST_KERNEL: Final = Version("5.5.0")


def compare_versions(
    library_or_version: str | Version, operation: str, requirement_version: str
) -> bool:
    """Compare the version of an installed package, or a version, to another.

    Args:
        library_or_version: the name of a package, or a version.
        operation: ``"<"``, ``"<="``, ``"=="``, ``"!="``, ``">="`` or ``">"``.
        requirement_version: the other version.

    Raises:
        OptionError: the operation or the version cannot be read.
        importlib.metadata.PackageNotFoundError: the package is not installed.

    Example:
        >>> from packaging.version import Version
        >>> from anydevice.utils import compare_versions
        >>> compare_versions(Version("2.10"), ">", "2.9")
        True
    """
    if operation not in _OPERATIONS:
        raise OptionError(f"operation={operation!r}: use one of {', '.join(_OPERATIONS)}")
    found = library_or_version
    if isinstance(found, str):
        found = Version(importlib.metadata.version(found))
    try:
        wanted = Version(requirement_version)
    except InvalidVersion:
        raise OptionError(f"{requirement_version!r} is not a version such as '2.6.0'") from None
    return _OPERATIONS[operation](found, wanted)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version to another; a build's suffix such as ``+cpu`` does not count.

    Args:
        operation: see `compare_versions`.
        version: such as ``"2.6"``.

    Raises:
        OptionError: the operation or the version cannot be read.

    Example:
        >>> from anydevice.utils import is_torch_version
        >>> is_torch_version(">=", "2.6")
        True
    """
    import torch

    return compare_versions(Version(Version(torch.__version__).base_version), operation, version)


def check_os_kernel() -> None:
    """Warn where Linux's kernel is so old that processes may hang (before 5.5).

    Example:
        >>> from anydevice.utils import check_os_kernel
        >>> check_os_kernel()
    """
    if platform.system() != "Linux":
        return
    text = platform.release().split("-")[0].split("+")[0]
    try:
        version = Version(text)
    except InvalidVersion:
        return
    if version < _OLDEST_KERNEL:
        warnings.warn(
            f"the kernel {text} is older than {_OLDEST_KERNEL}, where processes may hang. "
            "Use a newer one.",
            stacklevel=2,
        )
