"""Bytes of modules, and weights that are tied.

Sizes are of the weights as they will be once loaded, so the model may stand on meta. A tied weight
is counted once, under the first of its names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn

from anydevice.dtypes import PACKED_BITS, DtypeLike, dtype_bits
from anydevice.errors import ModelError
from anydevice.tensors import PLAIN_TYPES
from anydevice.ties import Ties
from anydevice.weights import iter_slots

__all__ = [
    "allocated_bytes",
    "calculate_maximum_sizes",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "dtype_after_load",
    "get_max_layer_size",
    "get_module_size_with_ties",
    "tensor_bytes",
]

#: Bytes that the caching allocators of accelerators hand out at least, and a multiple of.
_ALLOCATION: Final = 512


# ---------------------------------------------------------------------- one tensor


def tensor_bytes(tensor: torch.Tensor, dtype: DtypeLike | None = None) -> int:
    """Bytes that a tensor takes, now or as another dtype; partial bytes are rounded up.

    Args:
        tensor: on any device; a subclass made of inner tensors (a quantized weight) is their sum.
        dtype: the dtype in which it is to be held; by default its own.

    Raises:
        ModelError: it has no shape yet (the parameter of a lazy module).
    """
    own = tensor.dtype
    if dtype is None or dtype is own:
        if (
            type(tensor) in PLAIN_TYPES
            and tensor.layout is torch.strided
            and own not in PACKED_BITS
        ):
            return tensor.nbytes
        if hasattr(tensor, "__tensor_flatten__"):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            return sum(tensor_bytes(part) for part in parts if isinstance(part, torch.Tensor))
        if own not in PACKED_BITS:
            return _elements(tensor) * own.itemsize
        dtype = own
    return (_elements(tensor) * dtype_bits(dtype) + 7) // 8


def allocated_bytes(size: int) -> int:
    """Bytes that a tensor of ``size`` bytes takes on an accelerator: allocators round up to 512."""
    return -(-size // _ALLOCATION) * _ALLOCATION


def dtype_after_load(
    name: str,
    tensor: torch.Tensor,
    dtype: DtypeLike | None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
) -> DtypeLike:
    """The dtype in which a weight is held once loaded.

    Args:
        name: its full name.
        tensor: the weight.
        dtype: what weights are cast to; only floating-point ones are.
        special_dtypes: full names of weights to their own dtype, whatever theirs is.
    """
    if special_dtypes and name in special_dtypes:
        return special_dtypes[name]
    return dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype


def _elements(tensor: torch.Tensor) -> int:
    try:
        return tensor._nnz() if tensor.layout is torch.sparse_coo else tensor.numel()
    except ValueError:  # torch's own message speaks of anything but sizes
        raise ModelError(
            f"a {type(tensor).__name__} has no shape yet: run its lazy module once"
        ) from None


# ---------------------------------------------------------------------- modules


def compute_module_sizes(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Bytes of every module, parameter and buffer of a model, by full name.

    Args:
        model: on any device, meta too.
        dtype: what floating-point weights are cast to when loaded.
        special_dtypes: full names of weights to their own dtype.
        buffers_only: leave parameters out.

    Returns:
        Name to bytes; ``""`` is the whole. A tied weight counts once, under its first name; what
        holds nothing is absent, and reads as 0.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import compute_module_sizes
        >>> compute_module_sizes(nn.Sequential(nn.Linear(4, 4, bias=False)))["0"]
        64
    """
    sizes: dict[str, int] = defaultdict(int)
    ties, counted = Ties(), 0
    for name, slot in iter_slots(model):
        tensor = slot.get()
        if tensor is None or (buffers_only and not slot.is_buffer):
            continue
        if ties.number(tensor) < counted:
            continue
        counted += 1
        size = tensor_bytes(tensor, dtype_after_load(name, tensor, dtype, special_dtypes))
        sizes[""] += size
        end = name.find(".")
        while end != -1:
            sizes[name[:end]] += size
            end = name.find(".", end + 1)
        sizes[name] += size
    return sizes


def get_max_layer_size(
    modules: Sequence[tuple[str, nn.Module | torch.Tensor]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str],
) -> tuple[int, list[str]]:
    """Find the largest layer: a module without children, or of a class that must not be split.

    Args:
        modules: names with their modules (or parameters), such as ``list(model.named_children())``.
        module_sizes: bytes by name, from `compute_module_sizes`.
        no_split_module_classes: names of classes that are a layer whatever they hold.

    Returns:
        The largest layer's bytes, and the names of all layers that have so many.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import compute_module_sizes, get_max_layer_size
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        >>> get_max_layer_size(list(model.named_children()), compute_module_sizes(model), [])
        (80, ['0'])
    """
    largest, names = 0, []
    stack = list(reversed(modules))
    while stack:
        name, module = stack.pop()
        children = [] if isinstance(module, torch.Tensor) else list(module.named_children())
        if children and type(module).__name__ not in no_split_module_classes:
            own: list[tuple[str, Any]] = [*_own_tensors(module), *children]
            stack += [(f"{name}.{n}" if name else n, m) for n, m in reversed(own)]
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Bytes of the whole model, and of its largest layer.

    Returns:
        ``(total, (largest, names of the layers that have so many))``. The model's own
        ``_no_split_modules`` say what is one layer.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import calculate_maximum_sizes
        >>> total, (largest, names) = calculate_maximum_sizes(nn.Sequential(nn.Linear(4, 4)))
        >>> total, largest
        (80, 80)
    """
    sizes = compute_module_sizes(model)
    no_split = getattr(model, "_no_split_modules", None) or []
    modules = [*_own_tensors(model), *model.named_children()]
    return sizes[""], get_max_layer_size(modules, sizes, no_split)


def compute_module_total_buffer_size(
    model: nn.Module,
    dtype: DtypeLike | None = None,
    special_dtypes: Mapping[str, DtypeLike] | None = None,
) -> int:
    """Bytes of all buffers of a model.

    Args:
        model: the model.
        dtype: that floating-point buffers will be loaded in; None: as they are.
        special_dtypes: dtypes of single buffers, by name.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import compute_module_total_buffer_size
        >>> compute_module_total_buffer_size(nn.BatchNorm1d(4))
        40
    """
    sizes = compute_module_sizes(
        model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True
    )
    return int(sizes.get("", 0))


def get_module_size_with_ties(
    tied_params: Sequence[str],
    module_size: int,
    module_sizes: Mapping[str, int],
    modules_to_treat: Sequence[tuple[str, nn.Module]],
) -> tuple[int, list[str], list[nn.Module]]:
    """Bytes of a module together with those that share weights with it.

    Args:
        tied_params: names of weights outside of the module that are tied to weights of it.
        module_size: the module's bytes.
        module_sizes: as `compute_module_sizes` gives.
        modules_to_treat: names and modules among which the others are.

    Returns:
        The bytes, with shared ones counted once; the others' names; the others.

    Raises:
        ModelError: a weight is in none of ``modules_to_treat``.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import compute_module_sizes, get_module_size_with_ties
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
        >>> model[1].weight = model[0].weight
        >>> sizes, later = compute_module_sizes(model), [("1", model[1])]
        >>> size, names, modules = get_module_size_with_ties(["1.weight"], sizes["0"], sizes, later)
        >>> names
        ['1']
    """
    size = module_size
    names: list[str] = []
    modules: list[nn.Module] = []
    for tied in tied_params:
        owners = [(n, m) for n, m in modules_to_treat if tied == n or tied.startswith(f"{n}.")]
        if not owners:
            raise ModelError(f"the tied weight {tied!r} is in none of the modules to treat")
        name, module = owners[0]
        size += module_sizes[name] - module_sizes[tied]
        names.append(name)
        modules.append(module)
    return size, names, modules


def _own_tensors(module: Any) -> Iterable[tuple[str, Any]]:
    return ((name, slot.get()) for name, slot in iter_slots(module, recurse=False))
