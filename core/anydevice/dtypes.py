"""Widths of dtypes: torch's own, packed ones, and those known by name only."""

from __future__ import annotations

import enum
import re
from typing import Final, TypeAlias

import torch

from anydevice.errors import ModelError

__all__ = ["PACKED_BITS", "CustomDtype", "DtypeLike", "dtype_bits", "dtype_byte_size"]

#: A torch dtype, its name, or the name of a type that torch lacks, such as ``"int4"`` or ``"fp8"``.
DtypeLike: TypeAlias = "str | torch.dtype | enum.Enum"

#: Types whose elements share a byte in torch's own storage; ``itemsize`` does not say so.
PACKED_BITS: Final = {torch.quint4x2: 4, torch.quint2x4: 2}

#: Names of types by their width, such as ``int4``, ``uint2``, ``fp8``, ``nf4``, ``float4_e2m1fn``.
_NAMED_WIDTH: Final = re.compile(r"(?:u?int|fp|nf|float|bfloat)(\d+)(?:_\w+)?")


class CustomDtype(str, enum.Enum):
    """Types that quantizers have and torch has not, for planning.

    Example:
        >>> from anydevice.utils import CustomDtype, dtype_byte_size
        >>> dtype_byte_size(CustomDtype.INT4)
        0.5
    """

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


def dtype_bits(dtype: DtypeLike) -> int:
    """Bits that one element takes.

    Args:
        dtype: see `DtypeLike`. ``torch.int4`` and its like are asked for as a wish and have the
            width that they name, though torch itself still gives each a whole byte.

    Raises:
        ModelError: the name has no width.
    """
    if isinstance(dtype, torch.dtype):
        if dtype in PACKED_BITS:
            return PACKED_BITS[dtype]
        named = re.fullmatch(r"u?int([1-7])", str(dtype).removeprefix("torch."))
        return int(named[1]) if named else dtype.itemsize * 8
    name = str(dtype.value if isinstance(dtype, enum.Enum) else dtype).removeprefix("torch.")
    known = getattr(torch, name, None)
    if isinstance(known, torch.dtype):
        return dtype_bits(known)
    width = _NAMED_WIDTH.fullmatch(name.lower())
    if width is None:
        raise ModelError(f"{dtype!r} is not a dtype: use a torch.dtype, or a name such as 'int4'")
    return int(width[1])


def dtype_byte_size(dtype: DtypeLike) -> float:
    """Bytes that one element takes; less than one where several share a byte.

    Args:
        dtype: see `DtypeLike`.

    Raises:
        ModelError: the name has no width.

    Example:
        >>> import torch
        >>> from anydevice.utils import dtype_byte_size
        >>> dtype_byte_size(torch.bfloat16), dtype_byte_size("int4")
        (2, 0.5)
    """
    bits = dtype_bits(dtype)
    return bits // 8 if bits % 8 == 0 else bits / 8
