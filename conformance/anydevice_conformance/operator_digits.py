"""How near an operator's results on a device must be to the host's: by its name, by dtype."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import torch

__all__ = ["DIGITS", "EACH", "OF_LARGEST", "allowed_of"]

#: What rounding may make of a result, in proportion to the largest one beside it: a few units in
#: the last place. Of functions some devices have float32's digits in float64.
OF_LARGEST: Final = {
    torch.float64: 5e-5,
    torch.complex128: 5e-5,
    torch.float32: 5e-5,
    torch.complex64: 5e-5,
    torch.float16: 8e-3,
    torch.complex32: 8e-3,
    torch.bfloat16: 5e-2,
}
#: Of products, which some devices compute with 10 bits of mantissa in float32.
_OF_PRODUCTS: Final = {
    torch.float64: 1e-8,
    torch.complex128: 1e-8,
    torch.float32: 8e-3,
    torch.complex64: 8e-3,
    torch.float16: 2e-2,
    torch.complex32: 2e-2,
    torch.bfloat16: 1e-1,
}
_PRODUCTS: Final = re.compile(
    r"mm|mv|dot|addr|outer|inner|kron|linear|conv|attention|einsum|cdist|lstm|gru|rnn|linalg|cov$"
    r"|corrcoef|cholesky|solve|inverse|eigen|singular|chain|fft|stft|matrix|vander|pinv|renorm"
)
#: Products with functions among them.
_WITH: Final = re.compile("attention|fft|lstm|gru|rnn")
#: Of which some devices have few digits, in every dtype.
_FEW_DIGITS: Final = re.compile(r"a(sin|cos|tan)h?\d?$|arc|digamma|lgamma|erfinv|logit|tan$")
#: Where places between elements are computed, and hence weights.
_BETWEEN: Final = re.compile(
    "resize|interpolate|upsample|enlarged|grid|bicubic|quantile|range|space"
)
#: Of what is only added and multiplied, the largest difference in float64: of that no device that
#: has it has float32's digits.
_SUMMED: Final = re.compile(
    r"(nan)?sum|mean|var|cumsum|cumprod|prod|sums of.*|mean(s| and variance).*|added with alpha"
    r"|lerp|addc(mul|div)|.*_add|sums by.*|means by.*"
)
_OF_SUMS: Final = 1e-9
#: Of one rounding, in proportion to the element itself: two units in the last place of what has few
#: digits.
EACH: Final = {
    torch.float64: 1e-14,
    torch.float32: 1e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
    torch.float8_e4m3fn: 0.13,
    torch.float8_e5m2: 0.26,
}


#: What rounds nothing.
_MOVED: Final = (
    "abs neg floor ceil round trunc copysign nan_to_num cat stack flip roll repeat permute tril "
    "triu diag unfold pad gather scatter index_select index_fill masked_fill masked_select "
    "masked_scatter where copies factories fill_ shapes take_along_dim "
    "repeat_interleave, cat of columns, tile and rot90, clone of a slice, rows by index, "
    "where of a number, fill_ in place, "
    "reads by index, columns by index, copies that are broadcast, index_copy of a cache, "
    "index_put of a cache, masked_scatter of rows, masked_fill of rows, where of rows, "
    "pads with options, parts and joins, copies that start elsewhere, overlapping windows"
)
#: Likewise, and whose zeros may have either sign.
_PICKED: Final = (
    "sign sgn maximum minimum fmax fmin relu relu6 hardtanh amax amin max min median sort cummax "
    "cummin topk kthvalue unique clamp scatter_reduce orders sets frac aminmax, least of topk, "
    "stable sort, stable sort downwards, extremes of dimensions, extremes by index, "
    "bounds that are tensors, unique with counts, unique in a row"
)
#: What rounds once.
_ROUNDED: Final = "add sub mul div square reciprocal, half of it, bfloat16 of it, many in one"


def _names(words: str) -> Iterator[str]:
    """Of the names, those of one word stand before the first comma."""
    first, *others = words.split(", ")
    return iter((*first.split(), *others))


#: How exact each element of an operator's results is, of `Usual`.
DIGITS: Final[dict[str, str]] = {
    name: digits
    for digits, words in (("moved", _MOVED), ("values", _PICKED), ("rounded", _ROUNDED))
    for name in _names(words)
}


def allowed_of(name: str, dtype: torch.dtype) -> float | None:
    """The largest difference in proportion to the largest value; None for none at all."""
    if dtype in (torch.float64, torch.complex128) and _SUMMED.fullmatch(name):
        return _OF_SUMS
    allowed = OF_LARGEST.get(dtype)
    if allowed is not None and (_BETWEEN.search(name) or _FEW_DIGITS.match(name)):
        return max(allowed, 1e-3)
    if not _PRODUCTS.search(name):
        return allowed
    functions = dtype in (torch.float64, torch.complex128) and _WITH.search(name)
    return allowed if functions else _OF_PRODUCTS.get(dtype)
