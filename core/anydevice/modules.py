"""Parameters and buffers in their modules: finding them, and changing what they hold.

A Parameter stays the same object for life: its ties, its attributes, its place in an optimizer and
its subclass survive whatever is done here. Only what it holds is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from anydevice.devices import CPU, DISK, Device, DeviceLike, parse_device
from anydevice.errors import ModelError
from anydevice.tensors import move_tensor

__all__ = [
    "Slot",
    "as_dtype",
    "exchange",
    "extract_model_from_parallel",
    "find_slot",
    "get_module_children_bottom_up",
    "iter_slots",
    "own_device",
    "set_module_tensor_to_device",
]


class Slot(NamedTuple):
    """One place that holds a tensor: a name in a module's ``_parameters`` or ``_buffers``.

    Attributes:
        module: the module that owns the slot.
        name: the tensor's name in ``module``.
        is_buffer: whether it stands in ``_buffers``.
    """

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def table(self) -> dict[str, Any]:
        """The module's own dict that the slot is in."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def persistent(self) -> bool:
        """Whether the tensor is part of the module's state dict."""
        return not (self.is_buffer and self.name in self.module._non_persistent_buffers_set)

    def get(self) -> torch.Tensor | None:
        """The tensor that stands there."""
        tensor: torch.Tensor | None = self.table.get(self.name)
        return tensor

    def put(self, tensor: torch.Tensor | None) -> None:
        """Let ``tensor`` stand there; nothing else learns of it."""
        self.table[self.name] = tensor


def iter_slots(
    module: nn.Module, prefix: str = "", *, recurse: bool = True, buffers: bool = True
) -> Iterator[tuple[str, Slot]]:
    """Every slot that holds a tensor, with its full name; tied tensors come once per name.

    A module that is registered under two names gives its slots under both.

    Args:
        module: where to begin.
        prefix: the name of ``module``, put before every name.
        recurse: whether to enter submodules.
        buffers: whether buffers are wanted too.
    """
    stack = [(prefix, module)]
    while stack:
        path, owner = stack.pop()
        dot = f"{path}." if path else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield dot + name, Slot(owner, name, False)
        if buffers:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield dot + name, Slot(owner, name, True)
        if recurse:
            stack += [(dot + n, m) for n, m in reversed(owner._modules.items()) if m is not None]


def own_device(module: nn.Module, *, buffers: bool = True) -> Device:
    """The device of a module's first tensor; the host where it has none, or one on meta.

    Args:
        module: the module.
        buffers: whether a buffer may be that tensor.
    """
    first = next((slot.get() for _, slot in iter_slots(module, buffers=buffers)), None)
    return CPU if first is None or first.is_meta else parse_device(first.device)


def find_slot(module: nn.Module, name: str) -> Slot:
    """The slot of a full name such as ``"layers.0.weight"``.

    Raises:
        ModelError: there is none.
    """
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError as error:
        raise ModelError(f"no tensor {name!r} in {type(module).__name__}: {error}") from None
    if leaf in owner._parameters:
        return Slot(owner, leaf, False)
    if leaf in owner._buffers:
        return Slot(owner, leaf, True)
    raise ModelError(
        f"no parameter or buffer {leaf!r} in module {path or type(module).__name__!r}; "
        f"it has {', '.join([*owner._parameters, *owner._buffers]) or 'none'}"
    )


def exchange(slot: Slot, value: torch.Tensor) -> None:
    """Let the slot's tensor hold ``value``'s data, with its device and dtype.

    A Parameter stays the same object, with its attributes, class and ``requires_grad`` (dropped
    only where the new dtype cannot have gradients). A buffer is replaced where it cannot be kept.
    """
    old = slot.get()
    if old is None or (slot.is_buffer and not isinstance(old, nn.Parameter)):
        slot.put(value.detach())
        return
    if type(value) is not torch.Tensor or value.requires_grad:
        value = value.detach()
    requires_grad = old.requires_grad and (value.is_floating_point() or value.is_complex())
    gradient = old.grad
    if gradient is not None:
        old.grad = None
    if old.is_meta or not _set_data(old, value, requires_grad):
        _swap(old, value, requires_grad)
    if gradient is not None and requires_grad and not value.is_meta:
        old.grad = move_tensor(gradient.detach(), parse_device(value.device)).to(value.dtype)


def _set_data(old: torch.Tensor, value: torch.Tensor, requires_grad: bool) -> bool:
    """Exchange by ``.data``, where torch takes the two for the same kind of tensor."""
    if type(value) is not torch.Tensor or old.device.type != value.device.type:
        return False
    try:
        old.requires_grad_(False)
        old.data = value
    except RuntimeError:
        return False
    finally:
        old.requires_grad_(requires_grad and (old.is_floating_point() or old.is_complex()))
    return True


def _swap(old: torch.Tensor, value: torch.Tensor, requires_grad: bool) -> None:
    """Exchange what the two Python objects stand for: across device types, and from meta.

    `torch.utils.swap_tensors` does so too, but refuses a tensor that an autograd graph or a weak
    reference holds. Here the object lives on as the same Parameter, so a weak reference shall go on
    pointing to it, and a graph keeps what it had; only its backward is stopped, as the gradient
    could not reach the Parameter any more.
    """
    new = torch.Tensor._make_subclass(type(old), value, requires_grad)
    if old.requires_grad and old.is_leaf and old._use_count() > 1:  # type: ignore[attr-defined]
        node = torch.autograd.graph.get_gradient_edge(old).node
        node.register_prehook(_refuse_gradient)
    hooks = getattr(old, "_post_accumulate_grad_hooks", None)
    torch._C._swap_tensor_impl(old, new)
    if hooks and requires_grad:
        old._post_accumulate_grad_hooks = hooks


def _refuse_gradient(_gradients: Any) -> None:
    raise ModelError(
        "backward of a forward that ran before the model was moved (dispatched, offloaded or "
        "undispatched): its gradients belong to weights that are not there any more. Run the "
        "forward again."
    )


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

    Args:
        model: perhaps wrapped in ``DataParallel``, ``DistributedDataParallel`` or
            ``torch.compile``.
        keep_fp32_wrapper: accepted for compatibility; anydevice wraps no forward for that.
        keep_torch_compile: give the compiled module back, around what was taken out.
        recursive: take submodules out of such wrappers too, in place.
    """
    compiled = model if hasattr(model, "_orig_mod") else None
    if compiled is not None:
        model = compiled._orig_mod  # type: ignore[assignment]
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if recursive:
        for name, child in list(model.named_children()):
            inner = extract_model_from_parallel(child, keep_fp32_wrapper, keep_torch_compile, True)
            if inner is not child:
                setattr(model, name, inner)
    if compiled is not None and keep_torch_compile:
        compiled._orig_mod = model
        return compiled
    return model


def as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """Read ``"float16"`` or ``torch.float16``.

    Raises:
        ModelError: torch has no dtype of that name.
    """
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ModelError(f"{dtype!r} is not a torch dtype")
    return found
