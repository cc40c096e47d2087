"""What is here: devices by the registry, packages by Python's search.

`availability` answers for ``is_foo_available`` of any ``foo``, so that a device that comes with a
vendor's package has its question, too.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any, Final

import torch
from packaging.version import Version

from anydevice import registry

__all__ = ["availability", "is_bf16_available", "is_fp16_available"]

_HOST: Final = "cpu"
#: Where a package is imported under another name than its question has.
_PACKAGES: Final = {
    "bnb": "bitsandbytes",
    "4bit_bnb": "bitsandbytes",
    "8bit_bnb": "bitsandbytes",
    "megatron_lm": "megatron",
    "torchdata_stateful_dataloader": "torchdata",
    "boto3": "boto3",
    "tensorboard": "tensorboard",
}


def availability(name: str) -> Callable[..., bool] | None:
    """The function that a name such as ``"is_foo_available"`` asks for.

    Args:
        name: of the function.

    Returns:
        A function that says whether a device of type ``foo`` is here or, where no device has that
        name, whether a package ``foo`` is installed. None for another kind of name.

    Example:
        >>> availability("is_cpu_available")()
        True
    """
    match = re.fullmatch(r"is_(\w+)_available", name)
    if match is None:
        return None
    what = match[1]
    kind = what.removeprefix("torch_")

    def is_available(*args: Any, min_version: str | None = None, **kwargs: Any) -> bool:
        if min_version is not None and Version(torch.__version__) < Version(min_version):
            return False
        if kind in registry.known_types() or _is_torchs(kind):
            return _has_device(kind)
        return _is_installed(_PACKAGES.get(what, what))

    is_available.__name__ = is_available.__qualname__ = name
    is_available.__doc__ = (
        f"Whether a device of type {kind!r} is here, or a package of that name is installed."
    )
    return is_available


def is_bf16_available(*ignored: bool, **also_ignored: bool) -> bool:
    """Whether the first accelerator, or the host without one, computes in bfloat16.

    Args:
        *ignored: the reference's ``ignore_tpu``: a backend answers for its device.
        **also_ignored: as above.

    Example:
        >>> from anydevice.utils import is_bf16_available
        >>> isinstance(is_bf16_available(), bool)
        True
    """
    return _first_supports(torch.bfloat16)


def is_fp16_available() -> bool:
    """Whether the first accelerator, or the host without one, computes in float16.

    Example:
        >>> from anydevice.utils import is_fp16_available
        >>> isinstance(is_fp16_available(), bool)
        True
    """
    return _first_supports(torch.float16)


def _first_supports(dtype: torch.dtype) -> bool:
    backend = registry.get_backend(registry.primary_type() or _HOST)
    return bool(backend.supports_dtype(dtype))


def _has_device(kind: str) -> bool:
    return any(
        record.device_type == kind and record.status == "available"
        for record in registry.list_backends()
    )


def _is_torchs(kind: str) -> bool:
    try:
        return torch.device(kind).type == kind
    except RuntimeError:
        return False


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
