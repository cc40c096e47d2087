"""Weights kept in a small dtype and computed with in a larger one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
from torch import nn

from anydevice.devices import Device, parse_device
from anydevice.hooks.base import ModelHook
from anydevice.hooks.registration import add_hook_to_module
from anydevice.hooks.resumable import RESUMABLE, Call, resume
from anydevice.hooks.structure import computes_with_parts
from anydevice.hooks.types import Args, Forward, Kwargs
from anydevice.interrupts import uninterrupted
from anydevice.transfer import Engine, OffloadGroup
from anydevice.weights import Slot, exchange, iter_modules, iter_slots

__all__ = ["LayerwiseCastingHook", "attach_layerwise_casting_hooks"]


#: Layers whose weights may be stored in a smaller dtype: not norms, their statistics, or parameters
#: that a model multiplies itself.
SAFE_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.Embedding,
    nn.EmbeddingBag,
    nn.MultiheadAttention,
)


class LayerwiseCastingHook(ModelHook):
    """Keeps the floating-point weights of a module in one dtype, and computes with them in another.

    Of a module with parts, only the weights of layers that tolerate it are cast: linear layers,
    convolutions, embeddings and attention. A layer that has the hook itself is cast, whatever its
    class. The weights lose precision, once, when the hook is attached; memory is saved from then
    on. Removing the hook leaves them in the storage dtype.

    Args:
        storage_dtype: the dtype in which weights are stored, such as ``torch.float8_e4m3fn``.
        compute_dtype: the dtype that they have during the forward, such as ``torch.bfloat16``.
        non_blocking: accepted for compatibility: casts are queued on the device in any case.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import LayerwiseCastingHook, add_hook_to_module
        >>> hook = LayerwiseCastingHook(torch.float16, torch.float32, non_blocking=False)
        >>> layer = add_hook_to_module(nn.Linear(2, 2), hook)
        >>> layer.weight.dtype, layer(torch.ones(1, 2)).dtype
        (torch.float16, torch.float32)
    """

    def __init__(
        self, storage_dtype: torch.dtype, compute_dtype: torch.dtype, non_blocking: bool
    ) -> None:
        self.storage_dtype = storage_dtype
        self.compute_dtype = compute_dtype
        self.non_blocking = non_blocking
        self._engine = Engine(prefetch_depth=0)
        self._groups: dict[Device, OffloadGroup] = {}

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Cast the module's weights to the storage dtype; the Parameters stay the same objects."""
        for _, slot in _slots(module):
            tensor = slot.get()
            if _is_floating(tensor) and tensor.dtype != self.storage_dtype:
                exchange(slot, tensor.detach().to(self.storage_dtype))
        return module

    def run_forward(self, module: nn.Module, forward: Forward, args: Args, kwargs: Kwargs) -> Any:
        """Run the forward with the weights in the compute dtype.

        It is done here and not in `pre_forward`, so that a hook that loads weights to a device is
        always around it.
        """
        tensors = (slot.get() for _, slot in _slots(module))
        first = next((tensor for tensor in tensors if _is_floating(tensor)), None)
        if first is None:
            return forward(*args, **kwargs)
        device = parse_device(first.device)
        group = self._groups.get(device)
        if group is None:
            parts = _layers(module)
            group = self._groups[device] = self._engine.group(
                type(module).__name__, parts, device, compute_dtype=self.compute_dtype
            )
        with group.call():
            output = forward(*args, **kwargs)
        if type(output) in RESUMABLE:
            return resume(
                output,
                Call(group.call, lambda function, value: function(value), lambda result: result),
            )
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Leave the weights in the storage dtype."""
        self._groups.clear()
        self._engine.close()
        return module


def attach_layerwise_casting_hooks(
    module: nn.Module,
    storage_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    skip_modules_pattern: str | tuple[str, ...] | None = None,
    skip_modules_classes: tuple[type[nn.Module], ...] | None = None,
    non_blocking: bool = False,
) -> None:
    """Keep the weights of a model's layers in a small dtype, and compute in a larger one.

    Only layers that tolerate it are cast: see `LayerwiseCastingHook`.

    Args:
        module: the model; changed in place.
        storage_dtype: the dtype in which weights are stored.
        compute_dtype: the dtype that a module's weights have during its forward.
        skip_modules_pattern: regular expressions; modules whose full name one is found in are left
            as they are, with all their parts. None, together with ``skip_modules_classes``: the
            hook is put on ``module`` itself.
        skip_modules_classes: modules of these classes are left as they are.
        non_blocking: see `LayerwiseCastingHook`.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from anydevice.hooks import attach_layerwise_casting_hooks
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> attach_layerwise_casting_hooks(model, torch.float16, torch.float32)
        >>> model[0].weight.dtype, model(torch.ones(1, 2)).dtype
        (torch.float16, torch.float32)
    """
    if skip_modules_pattern is None and skip_modules_classes is None:
        add_hook_to_module(
            module, LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking), append=True
        )
        return
    patterns = (
        (skip_modules_pattern,) if isinstance(skip_modules_pattern, str) else skip_modules_pattern
    )
    done: set[int] = set()

    def is_skipped(name: str, part: nn.Module) -> bool:
        return isinstance(part, skip_modules_classes or ()) or any(
            re.search(pattern, name) for pattern in patterns or ()
        )

    def is_whole(name: str, part: nn.Module) -> bool:
        """Whether it uses weights of its parts without calling them: it casts for them."""
        uses = computes_with_parts(part) or isinstance(part, nn.TransformerEncoderLayer)
        return uses and not any(is_skipped(n, p) for n, p in iter_modules(part, name))

    def visit(name: str, part: nn.Module) -> list[tuple[str, nn.Module]]:
        """Hook a module, or return its parts."""
        if is_skipped(name, part) or id(part) in done:
            return []
        done.add(id(part))
        whole = is_whole(name, part)
        children = [(n, c) for n, c in part._modules.items() if c is not None and not whole]
        if not children and _layers(part, asked=False):
            hook = LayerwiseCastingHook(storage_dtype, compute_dtype, non_blocking)
            add_hook_to_module(part, hook, append=True)
        return [(f"{name}.{n}" if name else n, child) for n, child in children]

    def attach() -> None:
        stack = [("", module)]
        while stack:
            stack += reversed(visit(*stack.pop()))

    uninterrupted(attach)


def _layers(module: nn.Module, asked: bool = True) -> list[tuple[str, nn.Module]]:
    """The modules below one (and itself) whose own weights are cast, with their names.

    Where the user has put the hook there (``asked``), a module without parts is cast in any case.
    """
    if asked and not module._modules:
        return [("", module)]
    found, safe = [], set()
    for name, part in iter_modules(module):  # parents come first
        if isinstance(part, SAFE_LAYERS) or id(part) in safe:
            safe |= {id(child) for child in part._modules.values()}
            found.append((name, part))
    return found


def _slots(module: nn.Module) -> Iterator[tuple[str, Slot]]:
    for name, layer in _layers(module):
        yield from iter_slots(layer, name, recurse=False)


def _is_floating(tensor: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return tensor is not None and tensor.is_floating_point()
