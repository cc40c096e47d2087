"""The dtype of each weight once loaded."""

from __future__ import annotations

import functools
from collections.abc import Collection

import torch

from anydevice.checkpoint.info import TensorInfo
from anydevice.errors import ModelError, OptionError
from anydevice.modules import as_dtype
from anydevice.tensors import PLAIN_TYPES

__all__ = ["Casting", "short"]


class Casting:
    """The dtype of each weight once loaded.

    Args:
        dtype: for weights of floating point; None keeps the model's, ``"auto"`` the file's.
        keep_in_fp32_modules: names of modules, or one name, whose weights are kept in float32.
        any_kind: load integers where the model has floating point, as 8-bit models do.

    Raises:
        ModelError: it is not a dtype of floating point.
        OptionError: ``keep_in_fp32_modules`` are no names.
    """

    def __init__(
        self,
        dtype: str | torch.dtype | None = None,
        keep_in_fp32_modules: Collection[str] | str | None = None,
        any_kind: bool = False,
    ) -> None:
        self.keeps_files = dtype == "auto"
        self.dtype = None if dtype is None or self.keeps_files else _dtype(dtype)
        if self.dtype is not None and not self.dtype.is_floating_point:
            raise ModelError(f"dtype={dtype!r}: weights are cast to types of floating point only")
        self.float32_parts = [f".{part}." for part in _names(keep_in_fp32_modules)]
        self.any_kind = any_kind
        self._changes_none = self.dtype is None and not self.float32_parts

    def result(self, name: str, info: TensorInfo, old: torch.Tensor) -> torch.dtype | None:
        """The dtype of a weight once loaded; None when there is none: `fault` says why."""
        if info.dtype is old.dtype:
            if self._changes_none or not info.dtype.is_floating_point:
                return info.dtype
        else:
            if _kind(info.dtype) != _kind(old.dtype):
                # A subclass of Parameter knows best what it can hold.
                plain = type(old) in PLAIN_TYPES
                return None if plain and not self.any_kind else info.dtype
            if not info.dtype.is_floating_point:
                return _exact(info.dtype, old.dtype)
        wanted = self._wanted(name, info, old)
        return wanted if wanted is info.dtype or _can_cast(info.dtype, wanted) else None

    def _wanted(self, name: str, info: TensorInfo, old: torch.Tensor) -> torch.dtype:
        """The dtype of a weight of floating point, whether torch has the cast or not."""
        if self.float32_parts and any(part in f".{name}." for part in self.float32_parts):
            return torch.float32
        if self.keeps_files or (info.dtype == old.dtype and info.dtype.itemsize == 1):
            return info.dtype  # 8-bit floats mean nothing without their scales: not to be cast
        return self.dtype or old.dtype

    def fault(self, name: str, info: TensorInfo, old: torch.Tensor) -> str:
        """Why `result` is None."""
        held = f"{name} holds {short(info.dtype)} in the checkpoint"
        if _kind(info.dtype) != _kind(old.dtype):
            return (
                f"{held} and {short(old.dtype)} in the model, which is another kind of number "
                "(a quantized checkpoint?)"
            )
        if not info.dtype.is_floating_point:
            return (
                f"{held} and {short(old.dtype)} in the model, which cannot hold all its values: "
                f"make it {short(info.dtype)} in the model"
            )
        return (
            f"{held}, which torch cannot cast to {short(self._wanted(name, info, old))}: a model "
            "that computes with it takes it as it is with dtype='auto', outside of "
            "keep_in_fp32_modules"
        )


def _kind(dtype: torch.dtype) -> str:
    return "float" if dtype.is_floating_point else "complex" if dtype.is_complex else "integer"


def _exact(dtype: torch.dtype, wanted: torch.dtype) -> torch.dtype | None:
    """``wanted``, where it can represent every value of ``dtype``."""
    try:
        return wanted if torch.promote_types(dtype, wanted) == wanted else None
    except RuntimeError:  # types that torch can hold but not compute with
        return wanted if dtype == wanted else None


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    try:
        return as_dtype(dtype)
    except ModelError as error:
        raise ModelError(f"dtype={dtype!r}: {error}") from None


def _names(modules: Collection[str] | str | None) -> list[str]:
    try:
        names = [modules] if isinstance(modules, str) else list(modules or ())
    except TypeError:
        names = [modules]  # type: ignore[list-item]
    if not all(isinstance(name, str) and name for name in names):
        raise OptionError(f"keep_in_fp32_modules={modules!r}: names of modules are needed")
    return names


@functools.cache
def _can_cast(dtype: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether torch has the cast; it lacks those of packed types."""
    try:
        torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype).to(wanted)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def short(dtype: torch.dtype) -> str:
    """Its name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
