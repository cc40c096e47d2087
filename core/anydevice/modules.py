"""Helpers for whole modules, which the reference has in its utilities."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from anydevice.devices import CPU, DISK, Device, DeviceLike, parse_device
from anydevice.errors import ModelError
from anydevice.tensors import move_tensor
from anydevice.weights import exchange, find_slot, iter_modules, iter_slots

__all__ = [
    "as_dtype",
    "extract_model_from_parallel",
    "get_module_children_bottom_up",
    "get_non_persistent_buffers",
    "is_compiled_module",
    "named_module_tensors",
    "own_device",
    "set_module_tensor_to_device",
]


def own_device(module: nn.Module, *, buffers: bool = True) -> Device:
    """The device of a module's first tensor; the host where it has none, or one on meta.

    Args:
        module: the module.
        buffers: whether a buffer may be that tensor.
    """
    first = next((slot.get() for _, slot in iter_slots(module, buffers=buffers)), None)
    return CPU if first is None or first.is_meta else parse_device(first.device)


def set_module_tensor_to_device(
    module: nn.Module,
    tensor_name: str,
    device: DeviceLike,
    value: torch.Tensor | None = None,
    dtype: str | torch.dtype | None = None,
    fp16_statistics: torch.Tensor | None = None,
    tied_params_map: dict[int, dict[torch.device, torch.Tensor]] | None = None,
    non_blocking: bool = False,
    clear_cache: bool = True,
) -> None:
    """Put a parameter or buffer of ``module`` on a device, and give it a value.

    The Parameter object stays the same, so ties and attributes survive.

    Args:
        module: where the tensor is.
        tensor_name: its full name.
        device: any spelling; ``"disk"`` is not one here.
        value: the new value; needed when the tensor is on meta.
        dtype: the dtype to hold it in; by default the tensor's own, to which ``value`` is cast.
        fp16_statistics: kept as the attribute ``SCB`` of the parameter, as 8-bit models do.
        tied_params_map: data pointers of tied weights to copies already on a device, reused.
        non_blocking: queue the copy where the device can.
        clear_cache: accepted for compatibility; no cache needs clearing here.

    Raises:
        ModelError: no such tensor; it is on meta and no value is given; the shapes differ; or the
            device is the disk.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.utils import set_module_tensor_to_device
        >>> layer = nn.Linear(2, 2, device="meta")
        >>> set_module_tensor_to_device(layer, "bias", "cpu", value=torch.ones(2))
        >>> layer.bias.tolist()
        [1.0, 1.0]
    """
    slot = find_slot(module, tensor_name)
    old = slot.get()
    place = parse_device(device)
    if place == DISK:
        raise ModelError(
            f"{tensor_name} cannot be set on the disk; disk_offload and dispatch_model write "
            "weights there"
        )
    if old is None:
        if value is None:
            return
        slot.put(move_tensor(value, place, non_blocking=non_blocking))
        return
    if old.is_meta and value is None and place.type != "meta":
        raise ModelError(f"{tensor_name} is on meta: a value is needed to put it on {device}")
    if value is not None and old.shape != value.shape:
        raise ModelError(
            f"{tensor_name} has shape {tuple(old.shape)}, the value {tuple(value.shape)}"
        )
    source = old if value is None else value
    wanted = as_dtype(dtype) if dtype is not None else old.dtype
    source = source.detach()
    if source.dtype != wanted:
        source = source.to(wanted)
    known = tied_params_map.get(source.data_ptr()) if tied_params_map else None
    new = known.get(place.torch) if known else None
    if new is None:
        new = move_tensor(source, place, non_blocking=non_blocking)
        if known is not None:
            known[place.torch] = new
    if value is not None or new.device != old.device or new.dtype != old.dtype:
        exchange(slot, new)
    if fp16_statistics is not None:
        target: Any = slot.get()
        target.SCB = move_tensor(fp16_statistics, place)


def get_module_children_bottom_up(
    model: nn.Module, return_fqns: bool = False
) -> list[nn.Module] | list[tuple[str, nn.Module]]:
    """List a model's modules, children before their parents; the last is the model.

    Args:
        model: where to begin.
        return_fqns: whether to give pairs of full name and module.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import get_module_children_bottom_up
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> [type(module).__name__ for module in get_module_children_bottom_up(model)]
        ['Linear', 'Sequential']
    """
    found: list[tuple[str, nn.Module]] = []
    level = [("", model)]
    while level:
        found += level
        level = [
            (f"{path}.{name}" if path else name, child)
            for path, parent in level
            for name, child in parent.named_children()
        ]
    found.reverse()
    return found if return_fqns else [module for _, module in found]


def extract_model_from_parallel(
    model: nn.Module,
    keep_fp32_wrapper: bool = True,
    keep_torch_compile: bool = True,
    recursive: bool = False,
) -> nn.Module:
    """Take a model out of the wrappers of torch's own parallel and compile packages.

    ``model`` itself stays as it is.

    Args:
        model: perhaps wrapped in ``DataParallel``, ``DistributedDataParallel`` or
            ``torch.compile``.
        keep_fp32_wrapper: accepted for compatibility; no module's own forward is wrapped.
        keep_torch_compile: where ``model`` is compiled, give a compiled module around what was
            taken out: ``model`` itself where that is what it holds, else another with the same
            options.
        recursive: take submodules out of such wrappers too, in place.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import extract_model_from_parallel
        >>> model = nn.Linear(2, 2)
        >>> extract_model_from_parallel(nn.DataParallel(model)) is model
        True
    """
    compiled = model if hasattr(model, "_orig_mod") else None
    if compiled is not None:
        model = compiled._orig_mod  # type: ignore[assignment]
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    while isinstance(model, parallel) or getattr(type(model), "is_precision_wrapper", False):
        model = model.module  # type: ignore[assignment]
    if recursive:
        stack = [model]
        while stack:
            parent = stack.pop()
            for name, child in list(parent.named_children()):
                inner = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile)
                if inner is not child:
                    setattr(parent, name, inner)
                stack.append(inner)
    if compiled is None or not keep_torch_compile:
        return model
    if compiled._orig_mod is model:
        return compiled
    # As torch copies a compiled module; to change this one would take its user's wrapper away.
    return type(compiled)(model, compiled.dynamo_ctx)


def is_compiled_module(module: Any) -> bool:
    """Whether a module is what ``torch.compile`` returned.

    Example:
        >>> import torch
        >>> from anydevice.utils import is_compiled_module
        >>> model = torch.nn.Linear(2, 2)
        >>> is_compiled_module(model), is_compiled_module(torch.compile(model, backend="eager"))
        (False, True)
    """
    return isinstance(module, nn.Module) and "_orig_mod" in module._modules


def get_non_persistent_buffers(
    module: nn.Module, recurse: bool = False, fqns: bool = False
) -> set[str]:
    """Names of buffers that are in no state dict.

    Args:
        module: the module.
        recurse: those of its submodules, too.
        fqns: full names, such as ``"rotary.cos"``, in place of the buffers' own.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.utils import get_non_persistent_buffers
        >>> module = nn.Module()
        >>> module.register_buffer("cache", torch.ones(1), persistent=False)
        >>> get_non_persistent_buffers(module)
        {'cache'}
    """
    found: set[str] = set()
    for path, owner in iter_modules(module) if recurse else [("", module)]:
        dot = f"{path}." if path and fqns else ""
        found |= {dot + name for name in owner._non_persistent_buffers_set}
    return found


def named_module_tensors(
    module: nn.Module,
    include_buffers: bool = True,
    recurse: bool = False,
    remove_non_persistent: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers, with their names.

    Args:
        module: the module.
        include_buffers: buffers, too.
        recurse: those of its submodules, too.
        remove_non_persistent: leave out buffers that are in no state dict.

    Example:
        >>> from torch import nn
        >>> from anydevice.utils import named_module_tensors
        >>> [name for name, _ in named_module_tensors(nn.Linear(2, 2))]
        ['weight', 'bias']
    """
    slots = list(iter_slots(module, recurse=recurse, buffers=include_buffers))
    slots.sort(key=lambda named: named[1].is_buffer)
    left_out = (
        get_non_persistent_buffers(module, recurse=recurse, fqns=True)
        if remove_non_persistent
        else ()
    )
    seen: set[int] = set()
    for name, slot in slots:
        tensor = slot.table[slot.name]
        if id(tensor) not in seen and not (slot.is_buffer and name in left_out):
            yield name, tensor
        seen.add(id(tensor))


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Read ``"float16"`` or ``torch.float16``.

    Raises:
        ModelError: torch has no dtype of that name.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ModelError(f"{dtype!r} is not a torch dtype")
    return found
