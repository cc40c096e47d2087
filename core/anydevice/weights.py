"""Parameters and buffers in their modules: finding them, and exchanging what they hold.

A Parameter stays the same object for life: its ties, its attributes, its place in an optimizer and
its subclass survive every change made here. Only the data that it holds is exchanged.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from anydevice.devices import parse_device
from anydevice.errors import ModelError
from anydevice.tensors import move_tensor

__all__ = [
    "Slot",
    "covering_name",
    "exchange",
    "find_slot",
    "iter_modules",
    "iter_slots",
    "require_module",
    "scales_weight",
]


# ---------------------------------------------------------------------- slots


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
        try:
            tensor: torch.Tensor | None = self.table[self.name]
        except (KeyError, RuntimeError):  # a scripted module's table raises the other
            return None
        return tensor

    def put(self, tensor: torch.Tensor | None) -> None:
        """Let ``tensor`` stand there; nothing else learns of it."""
        self.table[self.name] = tensor


def scales_weight(slot: Slot) -> bool:
    """Whether a buffer belongs to a quantized weight: its module owns a parameter of 8-bit numbers.

    The two are stored together, as code outside of a forward multiplies them.
    """
    return slot.is_buffer and any(
        p is not None and p.dtype.itemsize == 1 and p.dim() > 1
        for p in slot.module._parameters.values()
    )


def require_module(model: object) -> None:
    """Refuse what is no model, before it is worked with.

    Raises:
        ModelError: it is none.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            f"the model is a {type(model).__name__}, and no torch.nn.Module: build or load it first"
        )


def covering_name(name: str, names: Container[str]) -> str | None:
    """The longest of some names that is ``name`` or a module around it; None where none is.

    Args:
        name: of a module or tensor.
        names: full names; ``""`` is the whole model.
    """
    while name not in names:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return name


def iter_modules(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Every module with its full name, parents first; one registered twice comes under both names.

    Unlike ``named_modules`` this needs no recursion, so modules may be nested to any depth.

    Args:
        model: where to begin.
        prefix: the name of ``model``, put before every name.
    """
    stack = [(prefix, model)]
    while stack:
        path, module = stack.pop()
        yield path, module
        if module._modules:
            dot = f"{path}." if path else ""
            stack += [(dot + n, m) for n, m in reversed(module._modules.items()) if m is not None]


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
    for path, owner in iter_modules(module, prefix) if recurse else [(prefix, module)]:
        dot = f"{path}." if path else ""
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield dot + name, Slot(owner, name, False)
        if buffers:
            for name, buffer in owner._buffers.items():
                if buffer is not None:
                    yield dot + name, Slot(owner, name, True)


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


def exchange(slot: Slot, value: torch.Tensor, gradient: torch.Tensor | None = None) -> None:
    """Let the slot's tensor hold ``value``'s data, with its device and dtype.

    A Parameter stays the same object, with its attributes, class and ``requires_grad`` (dropped
    only where the new dtype cannot have gradients). A buffer is replaced where it cannot be kept.

    Args:
        slot: where the tensor stands.
        value: what it is to hold.
        gradient: its gradient on the value's device; by default that which it has is moved there.
    """
    old = slot.get()
    if old is None or (slot.is_buffer and not isinstance(old, nn.Parameter)):
        slot.put(value.detach())
        return
    if type(value) is not torch.Tensor or value.requires_grad:
        value = value.detach()
    requires_grad = old.requires_grad and (value.is_floating_point() or value.is_complex())
    if isinstance(slot.module, torch.jit.ScriptModule) and old.device.type != value.device.type:
        slot.put(nn.Parameter(value, requires_grad))  # it does not hold the Python object
        return
    before = old.grad
    if before is not None:
        old.grad = None
    if old.is_meta or old.is_inference() or not _set_data(old, value, requires_grad):
        _swap(old, value, requires_grad)
    if before is not None and requires_grad and not (before.is_meta or value.is_meta):
        if gradient is None:
            gradient = move_tensor(before.detach(), parse_device(value.device)).to(value.dtype)
        old.grad = gradient


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
    reference holds. Here the object stays the same Parameter, so a weak reference must go on
    pointing to it, and a graph keeps what it had; only its backward is stopped, as the gradient
    could not reach the Parameter any more.
    """
    # A wrapper around tensors: the class says how these are named.
    flatten = getattr(value, "__tensor_flatten__", None) if type(value) is type(old) else None
    if flatten is None:
        new = torch.Tensor._make_subclass(type(old), value, requires_grad)
    else:
        new = value.detach().requires_grad_(requires_grad)
    watched = old.requires_grad and old.is_leaf and not old.is_inference()
    if watched and old._use_count() > 1:  # type: ignore[attr-defined]
        node = torch.autograd.graph.get_gradient_edge(old).node
        node.register_prehook(_refuse_gradient)
    before, after = old._backward_hooks, getattr(old, "_post_accumulate_grad_hooks", None)
    inner = {} if flatten is None else {name: getattr(new, name) for name in flatten()[0]}
    torch._C._swap_tensor_impl(old, new)
    for name, tensor in inner.items():
        setattr(old, name, tensor)
    if before and requires_grad:  # the Python object has them still; what it stands for has not
        old._backward_hooks = None
        old._backward_hooks = before
    if after and requires_grad:
        old._post_accumulate_grad_hooks = after


def _refuse_gradient(_gradients: Any) -> None:
    raise ModelError(
        "backward of a forward that ran before the model was moved (dispatched, offloaded or "
        "undispatched): its gradients belong to weights that are not there any more. Run the "
        "forward again."
    )
