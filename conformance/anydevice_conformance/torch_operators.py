"""Torch's own descriptions of its operators: which there are, and what each is tried with."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import random
import re
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any, Final
from unittest import mock

import torch

__all__ = ["descriptions", "name_of", "outside_tests", "samples_of"]

_MODULE: Final = "torch.testing._internal.common_methods_invocations"
_MODULES_OF_SAMPLES: Final = (
    "torch.testing._internal.common_utils",
    "torch.testing._internal.opinfo.core",
)

#: Names of what is not tried. Everything else is.
_LEFT_OUT: Final = (
    # What is in it is not said.
    r"(new_)?empty|resize",
    # Their results are not the only right ones, or small errors of products grow in them.
    r"linalg\.(?!cross|diagonal|vecdot|vector_norm|vander|multi_dot)|svd|qr|lu|cholesky|geqrf|ormqr"
    r"|pca_|pinverse|logdet|matrix_exp|triangular_solve|norm\.nuc|mode|nanmedian",
    # Their other results are a device's own business, or they are for one kind of device.
    r"_?native_|_batch_norm|jiterator|torch\.|to_sparse|sparse|_segment|masked\.",
    # They look beyond the view that they are given, or ask for the host.
    r"as_strided|to$|tensor_split",
    # Not said for some of the arguments: negative floats as bytes, shifts by too much, the one of
    # several values that is written to one place, values at the edge of a bin.
    r"byte|bitwise_(left|right)_shift|index_put|put|hist",
    # Written for tests, or much slower than what they show.
    r"hash_tensor|special\.|polygamma|mvlgamma|gradient",
)
_IS_LEFT_OUT: Final = re.compile("|".join(f"(?:{pattern})" for pattern in _LEFT_OUT))

#: Where the order of equal values is open, and so the place of each: all values are different.
_ORDERED: Final = re.compile(
    r"(arg)?sort|topk|kthvalue|median|(arg|cum)?(max|min)\b|msort|nn\.functional\..*max_(un)?pool"
)
#: Where a result jumps where its argument hardly changes: only in dtypes with many digits.
_JUMPS: Final = re.compile(
    r"floor_divide|remainder|fmod|div\.(floor|trunc)|__rmod__|.*grid_sampl|linspace|logspace"
    r"|nn\.functional\.(interpolate|upsample)|_upsample|quantile|nanquantile|round\.dec"
)
#: So many whole numbers in a row these dtypes have; others have enough.
_EXACT: Final = {
    torch.bool: 1,
    torch.uint8: 256,
    torch.int8: 256,
    torch.bfloat16: 512,
    torch.float16: 4096,
}
#: So many of an operator's samples are looked at.
_LOOKED_AT: Final = 60


def descriptions() -> list[Any]:
    """Torch's descriptions of the operators to try.

    Raises:
        ImportError: this torch comes without them, or a package that they need is missing.
    """
    flags: Any = torch.backends
    kept = flags.__allow_nonbracketed_mutation_flag
    try:
        with _without_test_packages(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = importlib.import_module(_MODULE).op_db
    finally:
        flags.__allow_nonbracketed_mutation_flag = kept  # torch's tests forbid to set flags
    return [one for one in found if not _IS_LEFT_OUT.match(name_of(one))]


def name_of(description: Any) -> str:
    """Such as ``"div.floor_rounding"``."""
    variant = description.variant_test_name
    return f"{description.name}.{variant}" if variant else str(description.name)


def samples_of(description: Any, dtype: torch.dtype, count: int, seed: int) -> list[Any]:
    """Some of torch's samples of an operator's arguments, on the host; none where it has none."""
    name = name_of(description)
    if _JUMPS.match(name) and dtype not in (torch.float32, torch.float64):
        return []
    found: list[Any] = []
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(seed)
        with contextlib.suppress(Exception):  # some cannot be made in each dtype
            made = description.sample_inputs("cpu", dtype, requires_grad=False)
            found.extend(itertools.islice(made, _LOOKED_AT))
        if _ORDERED.match(name):
            found = [one for one in map(_with_different_values, found) if one is not None]
    return random.Random(seed).sample(found, min(count, len(found)))


def _with_different_values(sample: Any) -> Any:
    """The sample with values none of which comes twice; None where the dtype has too few."""
    values = sample.input
    if not isinstance(values, torch.Tensor):
        return None
    if any(value is False for value in (*sample.args, *sample.kwargs.values())):
        return None  # unsorted ones come in any order
    count, dtype = values.numel(), values.dtype
    if dtype.is_complex or count > _EXACT.get(dtype, 1 << 15):
        return None
    order = torch.randperm(count) - (0 if dtype is torch.uint8 else count // 2)
    sample.input = order.to(dtype).reshape(values.shape)
    return sample


@contextlib.contextmanager
def outside_tests() -> Iterator[None]:
    """Have torch's descriptions do without what they do for torch's own tests.

    There each operator that draws random numbers sets a seed first, and the stack is searched for
    the test that asks for samples, which takes ten times as long as an operator.
    """

    def called(operator: Any, *arguments: Any, **options: Any) -> Any:
        return operator(*arguments, **options)

    instead = {"wrapper_set_seed": called, "extract_test_fn": lambda: None}
    with contextlib.ExitStack() as stack:
        for module in (_MODULE, *_MODULES_OF_SAMPLES):
            for name, function in instead.items():
                if hasattr(sys.modules[module], name):
                    stack.enter_context(mock.patch.object(sys.modules[module], name, function))
        yield


@contextlib.contextmanager
def _without_test_packages() -> Iterator[None]:
    """Import torch's test modules without a package that they only take a base class from."""
    with contextlib.suppress(ImportError):
        importlib.import_module("expecttest")
        yield
        return
    stand_in = types.ModuleType("expecttest")
    stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = stand_in
    try:
        yield
    finally:
        del sys.modules["expecttest"]
